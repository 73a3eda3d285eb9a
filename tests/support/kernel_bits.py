"""Compare the bits of a step by kernels with a step by ``reference`` from equal lists."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from mp_optim.core.weight_delta import bits_differ, bits_set
from mp_optim.kernels.element_rules import ELEMENT_STEPS
from mp_optim.kernels.kernel_args import MAIN, TensorLists, bitmap_bytes
from mp_optim.kernels.reference import ReferenceBackend
from support.kernel_cases import GROUP, LONE, PASSES, Case, into_other_memory, lists_of, step_with

REFERENCE = ReferenceBackend()
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
OUTPUTS = [None, *FLOATS]
FIRST = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8]
SECOND = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
MAINS: list[torch.dtype | str | None] = [None, torch.int16, torch.int8, LONE]
SIZES = [0, 1, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 8191, 8192, 8193, 11_111]
CAUTIOUS = ("adam", "lion")

every_dtype = [
    Case(*outer, moments=inner[:2], noisy=inner[2], odd=at % 2 == 1, aligned=at % 4 > 1)
    for at, (outer, inner) in enumerate(
        zip(
            product(FLOATS, OUTPUTS, MAINS),
            cycle(product(FIRST, SECOND, (True, False))),
            strict=False,
        )
    )
]
"""Each gradient dtype with each output and main param, and each first moment with each second
moment."""


def on_device(lists: TensorLists, device: str) -> TensorLists:
    if device == "cpu":
        return lists

    def moved(tensors: Sequence[Tensor | None]) -> list[Any]:
        return [
            None
            if t is None
            else torch.empty(t.numel() + 8, dtype=t.dtype, device=device)[
                t.storage_offset() : t.storage_offset() + t.numel()
            ].copy_(t)
            for t in tensors
        ]

    return replace(
        lists,
        main=moved(lists.main),
        grad=moved(lists.grad),
        state={key: moved(tensors) for key, tensors in lists.state.items()},
        output=moved(lists.output),
    )


def assert_same(a: Tensor | None, b: Tensor | None, label: str) -> None:
    if a is None or b is None:
        assert a is b
        return
    a, b = a.cpu(), b.cpu()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    same = a.view(bits) == b.view(bits)
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    assert bool(same.all()), f"{label}: {a[~same][:4].tolist()} instead of {b[~same][:4].tolist()}"


def assert_same_lists(ours: TensorLists, theirs: TensorLists) -> None:
    for index in range(len(ours.main)):
        for key, tensors in ours.state.items():
            assert_same(tensors[index], theirs.state[key][index], f"{key}[{index}]")
        assert_same(ours.main[index], theirs.main[index], f"main[{index}]")
        assert_same(ours.output[index], theirs.output[index], f"output[{index}]")


def check(
    backend: Any,
    rule: str,
    sizes: Sequence[int],
    case: Case,
    *,
    device: str = "cpu",
    seed: int = 1,
    step: int = 2,
    multiplier: float = 0.375,
    control: str = "host",
    elsewhere: bool = False,
    marks: bool = False,
    **settings: Any,
) -> None:
    """Step by a backend and by ``reference``, and compare the bits of all tensors.

    Args:
        control: place of the multiplier: "host", "device", or "flag" (on the device with a skip
            flag).
        elsewhere: True to let the kernel read present values from other memory.
        marks: True to let the kernel mark the weights that change.
    """
    ours, theirs, before = (lists_of(seed, sizes, PASSES[rule], case) for _ in range(3))
    ours, short = on_device(ours, device), rule.split()[-1]
    plain = {"momentum": 0.0, "betas": (0.0, 0.999)} if rule.startswith("plain") else {}
    group = {**GROUP, **plain, **settings}
    given: Any = multiplier
    if control != "host":
        given = torch.tensor([multiplier, 0.0], device=device)[: 2 if control == "flag" else 1]
    if elsewhere:
        ours = into_other_memory(ours)
    if marks:
        bitmaps = [torch.zeros(bitmap_bytes(n), dtype=torch.uint8) for n in sizes]
        ours = replace(ours, changed=bitmaps)
    found = step_with(backend, short, ours, group, step, given)
    expected = step_with(REFERENCE, short, theirs, group, step, multiplier)
    assert_same_lists(ours, theirs)
    assert_same(found, expected, "sums")
    for index, bits in enumerate(ours.changed or ()):
        weights = [_weight(lists, before.output, index) for lists in (before, ours)]
        _check_marks(*weights, bits)
    for key, tensors in (ours.source or {}).items():
        present = before.main if key == MAIN else before.state[key]
        for one, other in zip(tensors, present, strict=True):
            assert_same(one, other, f"present {key}")


def _weight(lists: TensorLists, outputs: Sequence[Tensor | None], index: int) -> Tensor:
    """Return the model weight of a main param."""
    main, output = lists.main[index], outputs[index]
    return main if output is None else main.to(output.dtype)


def _check_marks(before: Tensor, after: Tensor, bits: Tensor) -> None:
    expected = torch.zeros(len(after), dtype=torch.bool)
    expected[bits_differ(before, after)] = True
    expected |= after.isnan()  # IEEE does not define the bits of a NaN that an operation makes.
    marked = bits_set(bits)
    assert marked[marked < len(after)].tolist() == expected.nonzero().view(-1).tolist()


cases = st.builds(
    Case,
    st.sampled_from(FLOATS),
    st.sampled_from(OUTPUTS),
    st.sampled_from(MAINS),
    st.tuples(st.sampled_from(FIRST), st.sampled_from(SECOND)),
    *[st.booleans()] * 4,
    average=st.sampled_from([None, torch.float32, torch.bfloat16]),
)
sizes_of_tensors = st.lists(
    st.one_of(st.integers(0, 70), st.sampled_from([*SIZES, 70_000]), st.integers(0, 5000)),
    min_size=1,
    max_size=4,
)


def check_drawn(
    backend: Any, rule: str, data: st.DataObject, device: str = "cpu", most: int = 70_000
) -> None:
    """Check a random case: lists of any form and any settings.

    Args:
        most: number of elements of the largest tensors.
    """
    case, muon = data.draw(cases), rule.startswith("muon")
    if rule == "muon_momentum":
        case = replace(case, output=case.output or torch.bfloat16, rest=None, average=None)
    settings: dict[str, Any] = {
        "lr": data.draw(st.sampled_from([0.0, 1.0, 1e-3, 0.3, 1e-6])),
        "eps": data.draw(st.sampled_from([0.0, 1e-8, 1.0])),
        "weight_decay": data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        "bias_correction": data.draw(st.booleans()),
        "adam_w_mode": data.draw(st.booleans()),
        "grad_averaging": data.draw(st.booleans()),
        "dampening": data.draw(st.sampled_from([0.0, 0.5])),
        "nesterov": rule not in ("plain sgd",) and data.draw(st.booleans()),
        "momentum": 0.0 if rule == "plain sgd" else data.draw(st.sampled_from([0.9, 0.3])),
        "betas": (0.9, 0.999),
        "cautious_wd": (rule in CAUTIOUS or muon) and data.draw(st.booleans()),
    }
    served = case.rest is None or case.output in (None, torch.bfloat16)
    served &= case.noisy or case.average != torch.bfloat16  # Other settings mark all weights.
    marks = backend.marks_changes and rule.split()[-1] in ELEMENT_STEPS and served
    controls = ["host", "device", "flag"]
    on_device = backend.takes_device_multipliers and not muon
    check(
        backend,
        rule,
        [min(size, most) for size in data.draw(sizes_of_tensors)],
        case,
        device=device,
        seed=data.draw(st.integers(0, 2**20)),
        step=data.draw(st.sampled_from([1, 2, 1000])),
        multiplier=float(np.float32(data.draw(st.sampled_from([1.0, 0.37, 1e-6, 1e-42])))),
        control=data.draw(st.sampled_from(controls)) if on_device else "host",
        elsewhere=backend.reads_source and not muon and data.draw(st.booleans()),
        marks=marks and data.draw(st.booleans()),
        **settings,
    )
