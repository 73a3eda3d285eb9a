"""The Triton kernels equal ``reference`` bit for bit. Without a GPU they run under Triton's
interpreter."""

from __future__ import annotations

import gc
import itertools
import math
import os
import re
import sys
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.config.state_forms import BLOCK
from mp_optim.core import CachedTensorList
from mp_optim.core.slot_state import scale_key
from mp_optim.kernels import choose_backend, proof_of
from mp_optim.kernels.codecs import Noise
from mp_optim.kernels.kernel_args import LambScalars, TensorLists
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.triton import triton_backend
from mp_optim.kernels.triton.backend import TritonBackend
from mp_optim.kernels.triton.launches import CHUNK, ROWS, SUM_CHUNK, WIDTH
from mp_optim.kernels.triton.proofs import SIZES as PROOF_SIZES
from mp_optim.kernels.triton.tables import Column, Plan, Tables
from support import tritons
from support.launch import PATH, run, run_forked_program
from support.triton_cases import GROUP, KEYS, LONE, ODD, PASSES, Case, lists_of, step_with

FOUND, WHY = triton_backend()
REFERENCE = ReferenceBackend()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
FIRST = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8]
SECOND = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
MAINS: list[torch.dtype | str | None] = [None, torch.int16, torch.int8, LONE]
SIZES = [0, 1, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 8191, 8192, 8193, 11_111]

pytestmark = [
    pytest.mark.skipif(FOUND is None, reason=f"no Triton kernels: {WHY}"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # the interpreter's, for overflow and nan in numpy


@pytest.fixture(autouse=True)
def no_tables_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels as they are in a new process: what they remember by its content is no other
    test's."""
    monkeypatch.setattr(sys.modules[__name__], "FOUND", TritonBackend())


def kernels() -> Any:
    assert FOUND is not None
    return FOUND


def on_device(lists: TensorLists) -> TensorLists:
    """Copies on the GPU; without one the lists themselves."""
    if DEVICE == "cpu":
        return lists

    def moved(tensors: Sequence[Tensor | None]) -> list[Any]:
        return [
            None
            if t is None
            else torch.empty(t.numel() + 8, dtype=t.dtype, device=DEVICE)[
                t.storage_offset() : t.storage_offset() + t.numel()
            ].copy_(t)
            for t in tensors
        ]

    return replace(
        lists,
        main=moved(lists.main),
        grad=moved(lists.grad),
        state={k: moved(v) for k, v in lists.state.items()},
        output=moved(lists.output),
    )


def on_host(lists: TensorLists) -> TensorLists:
    """Copies on the CPU."""

    def moved(tensors: Sequence[Tensor | None]) -> list[Any]:
        return [None if t is None else t.cpu().clone() for t in tensors]

    return replace(
        lists,
        main=moved(lists.main),
        grad=moved(lists.grad),
        state={k: moved(v) for k, v in lists.state.items()},
        output=moved(lists.output),
    )


def assert_same(a: Tensor | None, b: Tensor | None, label: str) -> None:
    """Equal bits; all NaNs count as equal, as IEEE does not say which one an operation makes."""
    if a is None or b is None:
        assert a is b
        return
    a, bits = (a.cpu(), {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize])
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
    rule: str,
    sizes: Sequence[int],
    case: Case,
    *,
    seed: int = 1,
    step: int = 2,
    multiplier: float = 0.375,
    **settings: Any,
) -> None:
    """One step by the kernels and one by ``reference``, from the same lists."""
    ours, theirs = (lists_of(seed, sizes, KEYS[rule], case) for _ in range(2))
    ours, group, short = on_device(ours), {**GROUP, **settings}, rule.split()[-1]
    found = step_with(kernels(), short, ours, group, step, multiplier)
    expected = step_with(REFERENCE, short, theirs, group, step, multiplier)
    assert_same_lists(ours, theirs)
    if expected is not None:
        assert_same(found, expected, "sums")


# -- the same bits --------------------------------------------------------------------------------


SMALL = Case(rest=torch.int8, moments=(torch.int8, torch.uint8), output=None)


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("rule", "aligned", "case"),
    [
        pytest.param(
            rule,
            aligned,
            case,
            marks=[] if (at + aligned + (case is SMALL)) % 2 else pytest.mark.slow,
        )
        for at, rule in enumerate(KEYS)
        for aligned in (True, False)
        for case in (Case(), SMALL)
    ],
    ids=str,
)
def test_sizes_around_every_boundary(rule: str, aligned: bool, case: Case) -> None:
    check(rule, SIZES, replace(case, aligned=aligned))


@pytest.mark.parametrize("rest", MAINS)
@pytest.mark.parametrize("output", [None, *FLOATS])
@pytest.mark.parametrize("grad", FLOATS)
def test_dtypes_of_gradient_main_param_and_output(
    grad: torch.dtype, output: torch.dtype | None, rest: torch.dtype | str | None
) -> None:
    for rule in ("adam", "plain sgd", "plain adam"):
        check(rule, [300, 1], Case(grad, output, rest, odd=True))


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(
    ("first", "second"), [*itertools.product(FIRST[:-1], SECOND), (torch.uint8, torch.uint8)]
)
def test_dtypes_of_moments(first: torch.dtype, second: torch.dtype, noisy: bool) -> None:
    for rule in ("adam", "lamb"):
        check(rule, [700, 3], Case(moments=(first, second), noisy=noisy, odd=first == second))
    if first == second or second == torch.uint8:
        rests = ("lion", None), ("sgd", torch.int8), ("lion", LONE), ("adam", torch.int16)
        for rule, rest in rests:
            check(rule, [700, 3], Case(moments=(first, second), noisy=noisy, rest=rest))


EXAMPLES = 12 if DEVICE == "cpu" else 5  # on a GPU nearly every one is compiled
cases = st.builds(
    Case,
    st.sampled_from(FLOATS),
    st.sampled_from([None, *FLOATS]),
    st.sampled_from(MAINS),
    st.tuples(st.sampled_from(FIRST), st.sampled_from(SECOND)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    average=st.sampled_from([None, torch.float32, torch.bfloat16]),
)
sizes_of_tensors = st.lists(
    st.one_of(st.integers(0, 70), st.sampled_from(SIZES), st.integers(0, 5000)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
@pytest.mark.parametrize("rule", list(KEYS))
def test_every_rule_equals_reference(rule: str, data: st.DataObject) -> None:
    check_drawn(rule, data)


@pytest.mark.repeats
@pytest.mark.slow
@settings(max_examples=4 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
@pytest.mark.parametrize("rule", list(KEYS))
def test_every_rule_equals_reference_in_more_cases(rule: str, data: st.DataObject) -> None:
    check_drawn(rule, data)


def check_drawn(rule: str, data: st.DataObject) -> None:
    check(
        rule,
        data.draw(sizes_of_tensors),
        data.draw(cases),
        seed=data.draw(st.integers(0, 2**20)),
        step=data.draw(st.sampled_from([1, 2, 1000])),
        multiplier=float(np.float32(data.draw(st.sampled_from([1.0, 0.37, 1e-6, 1e-42])))),
        lr=data.draw(st.sampled_from([0.0, 1.0, 1e-3, 0.3])),
        eps=data.draw(st.sampled_from([0.0, 1e-8, 1.0])),
        weight_decay=data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        bias_correction=data.draw(st.booleans()),
        adam_w_mode=data.draw(st.booleans()),
        grad_averaging=data.draw(st.booleans()),
        dampening=data.draw(st.sampled_from([0.0, 0.5])),
        nesterov=rule == "sgd" and data.draw(st.booleans()),
        momentum=0.0 if rule == "plain sgd" else 0.9,
        betas=(0.0 if rule == "plain adam" else 0.9, 0.999),
    )


@pytest.mark.parametrize("rule", ["adam", "lamb"])
def test_parts_that_begin_inside_a_parameter_have_their_own_random_numbers(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under the distributed optimizer; and none of it is left to ``reference``."""
    bytewise = Case(torch.float32, None, torch.int8, (torch.int8, torch.uint8))
    for case in (
        replace(bytewise, average=torch.bfloat16),
        Case(moments=(torch.bfloat16, torch.bfloat16), average=torch.float32),
    ):
        case = replace(case, noisy=True, inside=True)
        theirs = lists_of(1, [700, 3, 9000, 300], KEYS[rule], case)
        plain = lists_of(1, [700, 3, 9000, 300], KEYS[rule], replace(case, inside=False))
        step_with(REFERENCE, rule, theirs, GROUP, 2, 0.375)
        step_with(REFERENCE, rule, plain, GROUP, 2, 0.375)
        first = [lists.state["exp_avg"] for lists in (theirs, plain)]
        assert list(map(torch.equal, *first)) == [False, True, False, False]
        with monkeypatch.context() as alone:
            for method in ("step", "lamb_moments", "lamb_apply"):
                alone.setattr(ReferenceBackend, method, refuse_reference)
            ours = on_device(lists_of(1, [700, 3, 9000, 300], KEYS[rule], case))
            step_with(kernels(), rule, ours, GROUP, 2, 0.375)
        assert_same_lists(ours, theirs)


def refuse_reference(*arguments: object) -> None:
    raise AssertionError("a step by reference")


@pytest.mark.repeats
def test_many_steps_of_compact_state() -> None:
    case = Case(rest=torch.int8, moments=(torch.int8, torch.uint8), noisy=True)
    for rule in ("adam", "lamb"):
        ours, theirs = (lists_of(3, [700, 256], KEYS[rule], case) for _ in range(2))
        ours = on_device(ours)
        for step in range(1, 8):
            for backend, lists in ((kernels(), ours), (REFERENCE, theirs)):
                lists.noise[:] = [
                    Noise(step * 0x1234567, noise.stream) for noise in lists.noise or []
                ]
                step_with(backend, rule, lists, GROUP, step, 0.5)
        assert_same_lists(ours, theirs)


def test_blocks_with_zeros_denormals_and_values_that_are_no_numbers() -> None:
    """Every kind of block beside others: what one holds must not leak into another."""
    blocks = [0.0, 1e-45, 1e-40, 2.0**-100, 2.0**-101, 1.0, 3e38, math.inf, math.nan]
    rows = torch.tensor(blocks).repeat_interleave(BLOCK).view(-1, BLOCK) * torch.linspace(
        -1, 1, BLOCK
    )
    x = torch.cat([rows.flatten(), torch.tensor(ODD)])
    group = {**GROUP, "momentum": 0.5, "betas": (0.5, 0.5), "weight_decay": 0.0}
    for first, second in zip(FIRST, [*SECOND, torch.uint8], strict=True):
        for noisy in (False, True):
            ours, theirs = (
                lists_of(
                    1,
                    [len(x)],
                    KEYS["adam"],
                    Case(torch.float32, None, None, (first, second), noisy),
                )
                for _ in range(2)
            )
            for lists in (ours, theirs):
                lists.grad[0].copy_(x)
            ours = on_device(ours)
            step_with(kernels(), "adam", ours, group, 1, 1.0)
            step_with(REFERENCE, "adam", theirs, group, 1, 1.0)
            assert_same_lists(ours, theirs)


def test_a_root_that_is_far_below_its_block_is_stored_as_the_smallest_code() -> None:
    for second in (torch.float16, torch.uint8):
        lists = lists_of(
            1, [BLOCK], KEYS["adam"], Case(torch.float32, None, None, (torch.float32, second))
        )
        lists.grad[0].fill_(1e-12)[0] = 1e6
        for key in ("exp_avg_sq", scale_key("exp_avg_sq")):
            lists.state[key][0].zero_()
        lists = on_device(lists)
        step_with(kernels(), "adam", lists, GROUP, 1, 1.0)
        codes = lists.state["exp_avg_sq"][0]
        assert (codes.view(torch.int16) if second == torch.float16 else codes).min() == 1


@pytest.mark.repeats
@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_every_half_is_read_and_floats_near_a_half_are_rounded_as_torch_does(stride: int) -> None:
    group = {**GROUP, "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        main = torch.zeros(2**16, device=DEVICE)
        step_with(
            kernels(), "sgd", TensorLists([main], [every.to(DEVICE)], {}, [None]), group, 1, 1.0
        )
        assert_same(main, torch.zeros(2**16) - every.float(), "read")
        exact = every.float()
        exact = exact[exact.isfinite()]
        near = torch.cat(
            [torch.nextafter(exact, torch.tensor(s)) for s in (math.inf, -math.inf)]
            + [(exact[1:] + exact[:-1]) / 2, exact * (1 + 2**-12), exact * (1 + 2**-9)]
        )[::stride]
        output, mains = (
            torch.empty(len(near), dtype=dtype, device=DEVICE),
            near.to(DEVICE, copy=True),
        )
        grads = torch.zeros(len(near), device=DEVICE)
        step_with(kernels(), "sgd", TensorLists([mains], [grads], {}, [output]), group, 1, 1.0)
        assert_same(output, near.to(dtype), "rounded")


_SWITCHES = ({"caution": True}, {"cautious_wd": True}, {"caution": True, "cautious_wd": True})


@pytest.mark.parametrize(
    "form",
    [(torch.float32, torch.float32), (torch.int8, torch.uint8)],
    ids=lambda form: str(form[0]).removeprefix("torch."),
)
@pytest.mark.parametrize(
    ("rule", "switches"),
    [
        *product(["adam", "lion", "plain adam"], _SWITCHES),
        *product(["muon_momentum", "muon_apply"], _SWITCHES[1:2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_flagged", [False, True], ids=["host", "device"])
def test_cautious_steps_equal_reference(
    rule: str, switches: dict[str, Any], form: Any, is_flagged: bool
) -> None:
    """The multiplier on the host, or on the device beside a flag: with odd values in tensors that
    begin anywhere, then with plain ones in aligned tensors."""
    if rule.startswith("muon"):
        form, is_flagged = (form[0], None), False
    given = torch.tensor([0.37, 0.0], device=DEVICE) if is_flagged else 0.37
    case = Case(moments=form, odd=not is_flagged, aligned=is_flagged)
    group = {**GROUP, **switches, "betas": (0.9 * (not rule.startswith("plain")), 0.999)}
    theirs = lists_of(5, [0, 1, 257, 2500], PASSES[rule], case)
    ours = on_device(lists_of(5, [0, 1, 257, 2500], PASSES[rule], case))
    for step in (2, 3):
        made = step_with(kernels(), rule.split()[-1], ours, group, step, given)
        expected = step_with(REFERENCE, rule.split()[-1], theirs, group, step, 0.37)
        if expected is not None:
            assert made is not None and torch.equal(made.cpu(), expected)
    assert_same_lists(on_host(ours), theirs)


# -- sums -----------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes_of_tensors, st.sampled_from(FLOATS), st.booleans(), st.booleans(), st.integers(0, 2**20)
)
def test_sums_of_squares_equal_reference(
    sizes: list[int], dtype: torch.dtype, odd: bool, aligned: bool, seed: int
) -> None:
    lists = lists_of(seed, sizes, (), Case(dtype, odd=odd, aligned=aligned))
    assert_same(
        kernels().sum_of_squares(on_device(lists).grad),
        REFERENCE.sum_of_squares(lists.grad),
        "sums",
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch, no_tables_yet: None) -> None:
    """Sums of few thousand elements take several rounds."""
    monkeypatch.setattr("mp_optim.kernels.triton.backend.CHUNK", 2048)
    monkeypatch.setattr("mp_optim.kernels.triton.launches.SUM_CHUNK", 1024)
    monkeypatch.setattr("mp_optim.kernels.triton.launches.RUN", 4)
    monkeypatch.setattr("mp_optim.kernels.triton.tables.RUN", 4)


def test_sums_in_several_rounds(small_chunks: None) -> None:
    sizes = [0, 1024 * 4, 1024 * 16 + 1, 18_000, 5]
    lists = lists_of(5, sizes, (), Case(torch.float32))
    assert_same(
        kernels().sum_of_squares(on_device(lists).grad),
        REFERENCE.sum_of_squares(lists.grad),
        "sums",
    )
    check("lamb", sizes, Case())


def test_sums_of_mixed_dtypes_and_strides_and_of_nothing() -> None:
    tensors = [
        torch.randn(40, 30).t(),
        torch.randn(5).double(),
        torch.randn(2000).half(),
        torch.zeros(0),
        torch.randn(7).bfloat16(),
    ]
    on_gpu = [tensor.to(DEVICE) for tensor in tensors]
    assert_same(kernels().sum_of_squares(on_gpu), REFERENCE.sum_of_squares(tensors), "sums")
    assert kernels().sum_of_squares([]).shape == (0,)
    nothing = lists_of(1, [0, 0], KEYS["lamb"], Case())
    assert torch.equal(
        kernels().lamb_moments(on_device(nothing), LambScalars.at(GROUP, 1), 1.0).cpu(),
        torch.zeros(2, 2, dtype=torch.float64),
    )


@pytest.mark.skipif(DEVICE != "cpu", reason="the tables of this test are made by hand, on the CPU")
def test_elements_past_the_range_of_32_bits() -> None:
    from mp_optim.kernels.triton.kernels import sums

    big = torch.from_numpy(np.zeros(2**32 + 9000, np.int16)).view(
        torch.bfloat16
    )  # untouched, it takes no memory
    big[-1], big[2**32 - 16384] = 3.0, 5.0
    owners = torch.zeros(2, dtype=torch.int32)
    first = torch.tensor([-(2**32 // 16384 - 1)], dtype=torch.int32)
    found = torch.empty(2, dtype=torch.float64)
    address = torch.tensor([big.data_ptr()])
    sums.chunk_sums[(2,)](
        owners,
        first,
        torch.tensor([len(big)]),
        address,
        found,
        TYPE=sums.tl.bfloat16,
        ALIGNED=True,
        CHUNK=16384,
    )
    assert found.tolist() == [25.0, 9.0]


@pytest.mark.parametrize("count", [30_000, pytest.param(2**31 + 3000, marks=pytest.mark.gpu)])
def test_both_ends_of_a_tensor_of_more_elements_than_31_bits_count(count: int) -> None:
    """A step and a sum with gradients and outputs in bfloat16; where an index wrapped around, the
    end would be stepped as the beginning. Takes 17 GB on a GPU."""
    if DEVICE != "cpu" and torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs a GPU with 24 GB free")
    end = 9000
    main = torch.zeros(count, device=DEVICE)
    grad = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
    output = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
    tail = torch.linspace(-2, 2, end)
    main[-end:], grad[-end:] = tail.to(DEVICE), tail.flip(0).to(DEVICE)
    main[:end], grad[:end] = tail.flip(0).to(DEVICE), tail.to(DEVICE)
    parts = [slice(0, end), slice(-end, None)]
    theirs = TensorLists(
        [main[part].cpu() for part in parts],
        [grad[part].cpu() for part in parts],
        {},
        [output[part].cpu() for part in parts],
    )
    group = {**GROUP, "lr": 0.5, "momentum": 0.0}
    step_with(kernels(), "sgd", TensorLists([main], [grad], {}, [output]), group, 2, 0.375)
    step_with(REFERENCE, "sgd", theirs, group, 2, 0.375)
    for place, part in enumerate(parts):
        assert_same(main[part], theirs.main[place], "main")
        assert_same(output[part], theirs.output[place], "output")
    middle = main[end:-end]
    assert not middle.any()
    grad[end:-end] = 0.5
    expected = (count - 2 * end) * 0.25 + 2 * grad[:end].double().square().sum().item()
    found = kernels().sum_of_squares([grad])
    assert found.tolist() == pytest.approx([expected], rel=1e-12)


# -- what is on the device ------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(KEYS))
def test_multiplier_and_skip_may_be_on_the_device(rule: str) -> None:
    case, sizes = (Case(rest=torch.int16, moments=(torch.int8, torch.bfloat16)), [2500, 7])
    short = rule.split()[-1]
    for control in ([0.37], [0.37, 0.0]):
        ours, theirs = (on_device(lists_of(1, sizes, KEYS[rule], case)) for _ in range(2))
        step_with(kernels(), short, ours, GROUP, 2, torch.tensor(control, device=DEVICE))
        step_with(kernels(), short, theirs, GROUP, 2, float(np.float32(0.37)))
        assert_same_lists(ours, on_host(theirs))
    ours, theirs = (on_device(lists_of(1, sizes, KEYS[rule], case)) for _ in range(2))
    skip = torch.tensor([0.37, 1.0], device=DEVICE)
    if rule == "lamb":
        scalars = LambScalars.at(GROUP, 2)
        assert not kernels().lamb_moments(ours, scalars, skip).any()
        kernels().lamb_apply(ours, scalars, torch.ones(2, device=DEVICE), skip=skip[1:])
    else:
        step_with(kernels(), short, ours, GROUP, 2, skip)
    assert_same_lists(ours, on_host(theirs))


def test_ratios_may_be_on_the_device() -> None:
    ours, theirs = (on_device(lists_of(1, [2500, 7, 9], KEYS["lamb"], Case())) for _ in range(2))
    scalars, ratios = LambScalars.at(GROUP, 2), [0.5, 0.25, 0.125]
    for lists in (ours, theirs):
        lists.output[1] = torch.zeros(7, dtype=torch.float16, device=DEVICE)  # two kinds
    kernels().lamb_apply(ours, scalars, torch.tensor(ratios, device=DEVICE))
    kernels().lamb_apply(theirs, scalars, ratios)
    assert_same_lists(ours, on_host(theirs))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_ratios_are_formed_on_the_device_as_on_the_host(decay: float) -> None:
    sizes, group = [2500, 7, 0, 300, 9], {**GROUP, "weight_decay": decay, "lr": 0.1}
    ours, theirs = (lists_of(1, sizes, KEYS["lamb"], Case()) for _ in range(2))
    for lists in (ours, theirs):
        lists.main[1].zero_()
        for tensor in (lists.main[3], lists.grad[3], lists.state["exp_avg"][3]):
            tensor.zero_()
        lists.grad[4][0] = math.inf
    ours, scalars = on_device(ours), LambScalars.at(group, 2)
    kernels().lamb(ours, scalars, torch.tensor([0.375, 0.0], device=DEVICE))
    sums = REFERENCE.lamb_moments(theirs, scalars, 0.375)
    ratios = [
        0.1 * math.sqrt(p) / math.sqrt(u) if scalars.adapts and p and u else 0.1
        for p, u in sums.tolist()
    ]
    REFERENCE.lamb_apply(
        theirs, scalars, torch.tensor(ratios, dtype=torch.float64).float().tolist()
    )
    assert_same_lists(ours, theirs)
    before = on_device(on_host(ours))
    kernels().lamb(ours, scalars, torch.tensor([0.375, 1.0], device=DEVICE))
    assert_same_lists(ours, on_host(before))


def test_fp64_gradients_and_mixed_dtypes_in_one_call() -> None:
    group = [
        Case(torch.float64, None),
        Case(),
        Case(torch.float32, None),
        Case(torch.float16, torch.float32),
        Case(),
    ]

    def joined(keys: tuple[str, ...]) -> TensorLists:
        parts = [lists_of(at, [900], keys, case) for at, case in enumerate(group)]
        return TensorLists(
            [p.main[0] for p in parts],
            [p.grad[0] for p in parts],
            {key: [p.state[key][0] for p in parts] for key in keys},
            [p.output[0] for p in parts],
        )

    for rule in ("adam", "lamb", "lion", "sgd"):
        theirs, ours = joined(KEYS[rule]), on_device(joined(KEYS[rule]))
        assert_sums = (
            step_with(REFERENCE, rule, theirs, GROUP, 2, 0.5),
            step_with(kernels(), rule, ours, GROUP, 2, 0.5),
        )
        assert_same_lists(ours, theirs)
        assert_same(assert_sums[1], assert_sums[0], "sums")
        skipped, before = on_device(joined(KEYS[rule])), on_device(joined(KEYS[rule]))
        if rule != "lamb":
            step_with(kernels(), rule, skipped, GROUP, 2, torch.tensor([1.0, 1.0], device=DEVICE))
            assert_same_lists(skipped, on_host(before))


# -- tables ---------------------------------------------------------------------------------------


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch, no_tables_yet: None) -> list[int]:
    """How many values were copied to the device, in order; not the numbers of each call, which
    always are."""
    counted: list[int] = []
    upload = Tables.upload

    def counting(tables: Tables, table: Tensor, device: torch.device) -> Tensor:
        if table.numel() != WIDTH:
            counted.append(table.numel())
        return upload(tables, table, device)

    monkeypatch.setattr(Tables, "upload", counting)
    return counted


@pytest.mark.parametrize("steady", [True, False])
def test_tables_are_copied_once(uploads: list[int], steady: bool) -> None:
    lists = on_device(lists_of(1, [300] * 20, KEYS["adam"], Case(aligned=True)))
    if steady:
        lists = TensorLists(
            CachedTensorList(lists.main),
            CachedTensorList(lists.grad),
            {key: CachedTensorList(found) for key, found in lists.state.items()},
            CachedTensorList(lists.output),
        )
    step_with(kernels(), "adam", lists, GROUP, 1, 1.0)
    assert (
        uploads == [20] * 8
    )  # owners, firsts, sizes, gradients, main params, two moments, outputs
    step_with(kernels(), "adam", lists, GROUP, 2, 0.5)
    assert len(uploads) == 8
    lists.grad[:] = [grad.clone() for grad in lists.grad]
    moved = TensorLists(
        lists.main,
        CachedTensorList(lists.grad) if steady else lists.grad,
        lists.state,
        lists.output,
    )
    step_with(kernels(), "adam", moved, GROUP, 3, 0.5)
    assert len(uploads) == 9


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Programs of each launch, and whether it took all addresses for multiples of 16."""
    from mp_optim.kernels.triton.kernels import sums, tiles

    counted: list[tuple[int, bool]] = []

    class Counted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, ALIGNED: bool, **named: Any) -> None:
                counted.append((grid[0], ALIGNED))
                self.kernel[grid](*arguments, ALIGNED=ALIGNED, **named)

            return launch

    monkeypatch.setattr(tiles, "step", Counted(tiles.step))
    monkeypatch.setattr(sums, "chunk_sums", Counted(sums.chunk_sums))
    return counted


def test_one_launch_however_many_tensors(launched: list[tuple[int, bool]]) -> None:
    check("adam", [300] * 40 + [9000], Case(aligned=True))
    assert launched == [(42, True)]


def with_one_odd(lists: TensorLists, column: str, place: int) -> TensorLists:
    """The lists with one tensor one element behind a multiple of 16 bytes."""
    tensors = lists.state.get(column) or getattr(lists, column)
    odd = tensors[place]
    tensors[place] = torch.empty(odd.numel() + 1, dtype=odd.dtype)[1:].copy_(odd)
    return lists


@pytest.mark.parametrize("rule", ["adam", "lamb"])
@pytest.mark.parametrize("column", ["grad", "main", "exp_avg", "exp_avg_sq", "output"])
def test_one_odd_address_makes_a_launch_of_its_own(
    launched: list[tuple[int, bool]], column: str, rule: str
) -> None:
    sizes, case = [300, 9000, 0, 8192, 5], Case(aligned=True)
    ours, theirs = (lists_of(1, sizes, KEYS[rule], case) for _ in range(2))
    ours = on_device(with_one_odd(ours, column, 1))
    found = step_with(kernels(), rule, ours, GROUP, 2, 0.375)
    expected = step_with(REFERENCE, rule, theirs, GROUP, 2, 0.375)
    assert_same_lists(ours, theirs)
    each = [(3, True), (2, False)]
    if rule == "lamb":
        assert_same(found, expected, "sums")
        each = [(5, True), *each] if column == "output" else each * 2
    assert launched == each


def test_one_odd_address_does_not_make_a_sum_slow(launched: list[tuple[int, bool]]) -> None:
    lists = lists_of(1, [300, 20_000, 0, 5], (), Case(aligned=True))
    expected = REFERENCE.sum_of_squares(lists.grad)
    lists = on_device(with_one_odd(lists, "grad", 1))
    assert_same(kernels().sum_of_squares(lists.grad), expected, "sums")
    assert launched == [(2, True), (-(-20_000 // SUM_CHUNK), False)]


def living() -> int:
    """How many columns and plans there are."""
    return sum(type(thing) in (Column, Plan) for thing in gc.get_objects())


def test_tables_of_lists_that_are_gone_are_forgotten() -> None:
    gc.collect()
    tables, device, before = Tables(remembered_bytes=0), torch.device(DEVICE), living()
    tensors = CachedTensorList([torch.zeros(3, device=device)])
    tables.column(tensors, device)
    plan = weakref.ref(tables.plan(tensors, 256, device))
    tables.values(array("i", [1]), device)  # by its content, only the newest is remembered
    assert living() == before + 2 and tables.plan(tensors, 256, device) is plan()
    del tensors
    assert living() == before and plan() is None


def test_tables_that_nobody_asks_for_are_given_up(uploads) -> None:
    tables, device, kept = Tables(remembered_bytes=1000), torch.device(DEVICE), {}
    for first in range(60):  # 20 tables of 100 bytes, each asked for again two tables later
        for value in (first // 3, max(0, first // 3 - 2)):
            table = tables.values(array("i", [value] * 25), device)
            kept[value] = weakref.ref(table)
            del table
            assert sum(100 for found in kept.values() if found() is not None) <= 1000
    assert uploads == [25] * 20  # what is asked for again stays
    tables.values(array("i", [0] * 25), device)
    assert uploads == [25] * 21
    for _ in range(5):
        check("adam", [30] * 20, Case())


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_step_does_not_synchronize_and_refuses_a_capture() -> None:
    control = torch.tensor([0.37, 0.0], device=DEVICE)
    case = Case(rest=torch.int8, moments=(torch.int8, torch.uint8))
    ours, theirs = (on_device(lists_of(1, SIZES, KEYS["adam"], case)) for _ in range(2))
    for lists in (ours, theirs):
        step_with(kernels(), "adam", lists, GROUP, 1, control)
        kernels().sum_of_squares(lists.grad)

    def step() -> None:
        step_with(kernels(), "adam", ours, GROUP, 2, control)

    with (
        pytest.raises(RuntimeError, match="after the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        step()
    torch.cuda.set_sync_debug_mode("error")
    step()
    sums = kernels().sum_of_squares(ours.grad)
    step_with(kernels(), "adam", theirs, GROUP, 2, control)
    torch.cuda.set_sync_debug_mode("default")
    assert_same_lists(on_host(ours), on_host(theirs))
    assert_same(sums.cpu(), kernels().sum_of_squares(theirs.grad).cpu(), "sums")


def test_step_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = on_device(lists_of(1, SIZES, KEYS["adam"], Case()))
    step_with(kernels(), "adam", lists, GROUP, 1, 0.37)
    before = [tensor.clone() for tensor in lists.main]
    monkeypatch.setattr("mp_optim.kernels.triton.tables.is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"a CUDA graph is captured: .*after the capture"):
        step_with(kernels(), "adam", lists, GROUP, 2, 0.37)
    assert all(map(torch.equal, lists.main, before))


# -- choosing it ----------------------------------------------------------------------------------


def test_it_proves_itself() -> None:
    backend, why = choose_backend("triton", torch.device(DEVICE))
    assert backend.name == "triton" and "triton" in why
    assert proof_of("triton", torch.device(DEVICE)).exact


def test_sizes_of_proofs_have_each_part_of_a_launch() -> None:
    """Whole tiles, several chunks of a step and of a sum, and what is left over of each."""
    tile = ROWS * BLOCK
    assert tile < max(PROOF_SIZES) % CHUNK and max(PROOF_SIZES) > 2 * CHUNK
    assert any(size > SUM_CHUNK and size % SUM_CHUNK == 0 for size in PROOF_SIZES)
    assert max(PROOF_SIZES) > SUM_CHUNK and max(PROOF_SIZES) % SUM_CHUNK
    assert any(tile < size < 2 * tile and size % 16 == 0 for size in PROOF_SIZES)
    assert any(size % CHUNK > tile and size % 16 for size in PROOF_SIZES)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("", "torch sees no GPU"),
        ("broken", "OSError: cannot load"),
        ("old", "Triton 3.5.1 takes denormals for 0"),
    ],
)
def test_without_a_device_or_a_triton_that_fits_everything_else_works(
    trouble: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "triton.py").write_text("raise OSError('cannot load')")
    path = [str(tmp_path)] if trouble == "broken" else []
    program = (
        "import torch; from mp_optim.kernels import choose_backend as choose\n"
        "print(choose('auto', torch.device('cpu'))[0].name)\n"
        f"torch.cuda.is_available = lambda: {trouble == 'old'}\n"
        f"if {trouble == 'old'}: import triton; triton.__version__ = '3.5.1'\n"
        "from mp_optim.kernels.triton import triton_backend; print(triton_backend()[1])"
    )
    path = os.pathsep.join([*path, PATH])
    begun = run if trouble == "broken" else run_forked_program  # that has imported Triton
    said_by_it = begun("-c", program, TRITON_INTERPRET="0", PYTHONPATH=path)
    auto, triton = said_by_it.splitlines()
    assert auto in ("native", "reference")
    assert said in triton


def test_an_optimizer_steps_with_it_and_gives_the_same_bits() -> None:
    def trained(backend: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = (
            torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
            .bfloat16()
            .to(DEVICE)
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=1e-2,
                bf16=True,
                fused_backend=backend,
                use_precision_aware_optimizer=True,
                exp_avg_dtype="uint8",
                exp_avg_sq_dtype="uint8",
                store_param_remainders=True,
                stochastic_rounding=True,
            ),
            model,
        )
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.scale_loss(
                model(torch.ones(4, 20, device=DEVICE).bfloat16()).square().mean()
            ).backward()
            assert optimizer.step().success
        return [param.detach().cpu() for param in model.parameters()]

    for ours, theirs in zip(trained("triton"), trained("reference"), strict=True):
        assert_same(ours, theirs, "param")


# -- what the compiler makes of it ----------------------------------------------------------------

WIDE = r"{}\.global[\w.:]*\.(?:v4\.[bfu]32|v2\.[bfu]64)"
HALF = r"{}\.global[\w.:]*\.v2\.[bfu]32"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the PTX of each kernel for sm_90, in one form or two."""
    return tritons.compiled(None, "90", tmp_path_factory.mktemp("triton"))


def test_no_scalar_is_compiled_into_a_kernel(compiled: dict[str, dict[str, Any]]) -> None:
    """Triton compiles integers that are 1 into the code; other steps and learning rates must not
    compile anew."""
    check_whole(compiled)


def check_whole(compiled: dict[str, dict[str, Any]]) -> None:
    """Every kernel there is, each compiled once."""
    assert {label: len(variant["ptx"]) for label, variant in compiled.items()} == dict.fromkeys(
        compiled, 1
    )
    assert {variant["kernel"] for variant in compiled.values()} == {
        "adam",
        "sgd",
        "lion",
        "lamb_moments",
        "lamb_apply",
        "muon_momentum",
        "muon_apply",
        "chunk_sums",
        "run_sums",
    }


def test_nothing_is_contracted_flushed_or_approximate(compiled: dict[str, dict[str, Any]]) -> None:
    """``.rn`` is what keeps the assembler from contracting a multiplication with an addition."""
    check_exact(compiled)


def check_exact(compiled: dict[str, dict[str, Any]]) -> None:
    for label, variant in compiled.items():
        ptx = variant["ptx"][0]
        inexact = sorted(set(tritons.INEXACT.findall(ptx)))
        assert not inexact, f"{label}: {inexact}"
        if variant["kernel"] in ROOTED:
            assert "sqrt.rn.f32" in ptx and "div.rn.f32" in ptx, label


def test_aligned_tensors_are_read_and_written_16_bytes_at_a_time(
    compiled: dict[str, dict[str, Any]],
) -> None:
    """Exactly as many wide accesses as the unmasked path of a thread has bytes."""
    for label, variant in compiled.items():
        counts = {}
        for verb in ("ld", "st"):
            ptx = variant["ptx"][0]
            counts[verb] = len(re.findall(WIDE.format(verb), ptx))
            counts[f"{verb} half"] = len(re.findall(HALF.format(verb), ptx))
        assert counts == variant["wide"], label


ROOTED = ("adam", "lamb_moments", "lamb_apply")
"""Kernels that divide by a root."""
REGISTERS = 65536
"""Of a multiprocessor of sm_90; a warp is given them in steps of 8 a thread."""


def held_warps(variant: dict[str, Any]) -> int:
    """Warps of a kernel that a multiprocessor holds, by what the assembler gave each thread."""
    threads, registers = 32 * variant["warps"], -(-variant["used"]["REG"] // 8) * 8
    return int(REGISTERS // (registers * threads) * variant["warps"])


def test_a_multiprocessor_holds_16_warps_of_a_kernel_and_nothing_is_spilled(
    compiled: dict[str, dict[str, Any]],
) -> None:
    """A step with fewer waits for memory. Sums have all their loads under way at once; 4-bit codes
    of tensors at odd addresses are rare. Eight bytes of a stack are two packed predicates."""
    held = {}
    for label, variant in compiled.items():
        assert variant["used"]["LOCAL"] == 0 and variant["used"]["STACK"] <= 8, label
        least = 12 if variant["kernel"] == "chunk_sums" else 16
        if "uint8" in label and "anywhere" in label:
            least = 8
        held[label] = (held_warps(variant) >= least, variant["used"]["REG"])
    assert all(enough for enough, _ in held.values()), held


@pytest.mark.slow
@pytest.mark.skipif(
    not tritons.folder_of(tritons.OLDEST).is_dir(),
    reason=f"not compiled by Triton {tritons.OLDEST}, the oldest supported: "
    f"PYTHONPATH=tests python -m support.tritons --fetch {tritons.OLDEST}",
)
def test_the_oldest_supported_triton_compiles_every_kernel(tmp_path: Path) -> None:
    """Users have the Triton that their torch brings; the newest takes more than those before it.
    Its assembler is more generous with registers."""
    compiled = tritons.compiled(tritons.OLDEST, "90", tmp_path)
    check_whole(compiled)
    check_exact(compiled)
    for label, variant in compiled.items():
        assert variant["used"]["LOCAL"] == 0 and held_warps(variant) >= 8, label
