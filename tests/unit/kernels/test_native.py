"""The compiled kernels equal ``reference`` bit for bit: sizes, alignments, odd values, dtypes,
threads, levels."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.config.rules import FIRST_MOMENT_DTYPES, SECOND_MOMENT_DTYPES
from mp_optim.config.state_forms import UINT4, blocks_of
from mp_optim.core.slot_state import REMAINDER, scale_key
from mp_optim.core.weight_delta import bits_differ, bits_set
from mp_optim.host.host_share import host_share
from mp_optim.kernels import native_library as native_library_file
from mp_optim.kernels.codecs import SECOND, Noise, encode_, split_, stored_dtype
from mp_optim.kernels.element_rules import RULE_SCALARS, TEXTS
from mp_optim.kernels.kernel_args import MAIN, LambScalars, TensorLists, bitmap_bytes
from mp_optim.kernels.native import NativeBackend
from mp_optim.kernels.native_library import (
    MpTensors,
    NativeLibrary,
    native_library,
    set_host_cores,
    set_host_threads,
)
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.state_format import moment_specs
from support.triton_cases import LONE

LIBRARY = native_library()
STATUS = Path("/proc/self/status")
REFERENCE = ReferenceBackend()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REMAINDERS = [None, torch.int16, torch.int8, LONE]
ODD = [
    0.0,
    -0.0,
    1e-40,
    -1e-40,
    1e-45,
    3e38,
    -3e38,
    65504.0,
    65520.0,
    6e-8,
    2.0**-133,
    1e-33,
    math.inf,
    -math.inf,
    math.nan,
]

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(LIBRARY.handle is None, reason=f"no native kernels: {LIBRARY.why}"),
]


@pytest.fixture(autouse=True, params=LIBRARY.levels or [""])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs at each level this CPU has."""
    before = LIBRARY.level
    LIBRARY.set_level(request.param)
    yield request.param
    LIBRARY.set_level(before)
    set_host_threads(None)


def values(
    generator: torch.Generator, n: int, dtype: torch.dtype, odd: bool, offset: int
) -> Tensor:
    """Random values over many magnitudes, ``offset`` elements into a buffer, with odd ones among
    them."""
    exponents = torch.randint(-12, 6, (n,), generator=generator).float()
    x = torch.randn(n, generator=generator) * torch.pow(10.0, exponents)
    if odd and n:
        where = torch.randint(0, n, (min(n, 40),), generator=generator)
        x[where] = torch.tensor(ODD)[torch.randint(0, len(ODD), (len(where),), generator=generator)]
    buffer = torch.zeros(n + offset, dtype=dtype)
    buffer[offset:] = x.to(dtype)
    return buffer[offset:]


class Maker:
    """Random tensors, each a few elements into a buffer of its own."""

    def __init__(self, seed: int, odd: bool) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.odd = odd

    def offset(self) -> int:
        return int(torch.randint(0, 9, (), generator=self.generator))

    def new(self, n: int, dtype: torch.dtype) -> Tensor:
        return values(self.generator, n, dtype, self.odd, self.offset())

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        offset = self.offset()
        return torch.zeros(n + offset, dtype=dtype)[offset:]

    def moment(self, name: str, n: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """A stored moment and its scales: of random values; every third block is small, every third
        odd."""
        value = self.new(n, torch.float32)
        if dtype in (torch.float16, torch.uint8, UINT4) and self.odd:
            mild = values(self.generator, n, torch.float32, False, 0)
            kinds = torch.randint(
                0, 3, (blocks_of(n),), generator=self.generator
            ).repeat_interleave(256)[:n]
            value.copy_(torch.where(kinds == 0, value, torch.where(kinds == 1, mild, mild * 1e-30)))
        if name == SECOND:
            value.abs_()
        forms = moment_specs(name, torch.Size([n]), stored_dtype(name, dtype))
        state = {key: self.empty(*shape, kind) for key, (shape, kind) in forms.items()}
        encode_(value, state[name], state.get(scale_key(name)), name == SECOND)
        return state

    def main(self, n: int, remainder: torch.dtype | str | None) -> tuple[Tensor, dict[str, Tensor]]:
        if not isinstance(remainder, torch.dtype):
            return self.new(n, torch.bfloat16 if remainder == LONE else torch.float32), {}
        value = self.new(n, torch.float32)
        main, rest = self.empty(n, torch.bfloat16), self.empty(n, remainder)
        split_(value, main, rest)
        return main, {REMAINDER: rest}


def lists_of(
    seed: int,
    sizes: list[int],
    grad: torch.dtype,
    output: torch.dtype | None,
    keys: tuple[str, ...],
    odd: bool,
    moments: Sequence[torch.dtype] = (torch.float32, torch.float32),
    remainder: torch.dtype | str | None = None,
    noisy: bool = False,
) -> TensorLists:
    """Lists with moments of the given dtypes (uint8 and uint4 stand for codes)."""
    maker, mains, states = Maker(seed, odd), [], []
    for n in sizes:
        main, state = maker.main(n, remainder)
        for key, dtype in zip(keys, (*moments, moments[0]), strict=False):
            state |= maker.moment(key, n, dtype) if key else {}
        mains.append(main)
        states.append(state)
    return TensorLists(
        mains,
        [maker.new(n, grad) for n in sizes],
        {key: [state[key] for state in states] for key in states[0]},
        [None if output is None else maker.new(n, output) for n in sizes],
        [
            Noise(
                seed * 77 & 0xFFFFFFFF,
                0xFFFFFF00 + 7919 * at & 0xFFFFFFFF,
                (0, 256, 2**32 - 512, 2**35 + 768)[at % 4],
            )
            for at in range(len(sizes))
        ]
        if noisy
        else None,
    )


def into_other_memory(lists: TensorLists, seed: int) -> TensorLists:
    """The same call with what it steps somewhere else, where there is nothing yet."""
    maker = Maker(seed, False)

    def other(tensor: Tensor) -> Tensor:
        found = maker.empty(tensor.numel(), tensor.dtype)
        found.view(torch.uint8).fill_(0xFF)
        return found

    return replace(
        lists,
        main=[other(main) for main in lists.main],
        source={MAIN: lists.main, **lists.state},
        state={key: [other(tensor) for tensor in tensors] for key, tensors in lists.state.items()},
    )


def assert_same(a: Tensor | None, b: Tensor | None, label: str) -> None:
    """Equal bits; all NaNs count as equal, as IEEE does not say which one an operation makes."""
    if a is None or b is None:
        assert a is b
        return
    bits = {4: torch.int32, 2: torch.int16, 1: torch.int8, 8: torch.int64}[a.itemsize]
    same = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
    assert bool(same.all()), f"{label}: {a[~same][:4].tolist()} instead of {b[~same][:4].tolist()}"


def assert_same_lists(ours: TensorLists, theirs: TensorLists) -> None:
    for index in range(len(ours.main)):
        assert_same(ours.main[index], theirs.main[index], f"main[{index}]")
        assert_same(ours.output[index], theirs.output[index], f"output[{index}]")
        for key, tensors in ours.state.items():
            assert_same(tensors[index], theirs.state[key][index], f"{key}[{index}]")


def run(
    backend: ReferenceBackend,
    rule: str,
    lists: TensorLists,
    group: dict[str, Any],
    step: int,
    multiplier: float,
) -> Tensor | None:
    if rule in TEXTS:
        backend.step(rule, lists, RULE_SCALARS[rule].at(group, step), multiplier)
    else:
        scalars = LambScalars.at(group, step)
        sums = backend.lamb_moments(lists, scalars, multiplier)
        backend.lamb_apply(lists, scalars, [0.1 / (1 + index) for index in range(len(lists.main))])
        return sums
    return None


KEYS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
    "plain sgd": (),
    "plain adam": ("", "exp_avg_sq"),
}
sizes_of_tensors = st.lists(
    st.one_of(
        st.integers(0, 70),
        st.sampled_from([255, 256, 257, 1023, 1024, 1025, 70_000]),
        st.integers(0, 5_000),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
@pytest.mark.parametrize("rule", list(KEYS))
def test_every_rule_equals_reference(rule: str, data: st.DataObject) -> None:
    sizes = data.draw(sizes_of_tensors)
    grad, output = (data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([None, *DTYPES])))
    seed, odd = data.draw(st.integers(0, 2**20)), data.draw(st.booleans())
    group = {
        "lr": data.draw(st.sampled_from([0.0, 1e-3, 0.3])),
        "betas": (0.0 if "plain" in rule else 0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": data.draw(st.sampled_from([0.0, 0.1])),
        "bias_correction": data.draw(st.booleans()),
        "adam_w_mode": data.draw(st.booleans()),
        "grad_averaging": data.draw(st.booleans()),
        "use_nvlamb": False,
        "momentum": 0.0 if rule == "plain sgd" else 0.9,
        "dampening": data.draw(st.sampled_from([0.0, 0.5])),
        "nesterov": rule == "sgd" and data.draw(st.booleans()),
    }
    multiplier = float(np.float32(data.draw(st.sampled_from([1.0, 0.37, 1e-6]))))
    step = data.draw(st.sampled_from([1, 2, 1000]))
    set_host_threads(data.draw(st.integers(1, 8)))
    moments = data.draw(
        st.tuples(st.sampled_from(FIRST_MOMENT_DTYPES), st.sampled_from(SECOND_MOMENT_DTYPES))
    )
    remainder, noisy = data.draw(st.sampled_from(REMAINDERS)), data.draw(st.booleans())
    if remainder is not None and output is not None:
        output = torch.bfloat16
    ours, theirs = (
        lists_of(seed, sizes, grad, output, KEYS[rule], odd, moments, remainder, noisy)
        for _ in range(2)
    )
    short = rule.split()[-1]
    if data.draw(st.booleans()):
        ours, before = into_other_memory(ours, seed + 1), deepcopy(ours)
        present = ours.source
    else:
        present = None
    found = run(NativeBackend(LIBRARY), short, ours, group, step, multiplier)
    if present is not None:
        for key, tensors in present.items():
            for tensor, was in zip(
                tensors, before.main if key == MAIN else before.state[key], strict=True
            ):
                assert_same(tensor, was, f"present {key}")
    expected = run(REFERENCE, short, theirs, group, step, multiplier)
    assert_same_lists(ours, theirs)
    if found is not None and expected is not None:
        assert_same(found, expected, "sums")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
@pytest.mark.parametrize("rule", ["adam", "lion", "plain sgd"])
def test_bits_are_set_of_weights_that_get_other_values(rule: str, data: st.DataObject) -> None:
    sizes, seed = data.draw(sizes_of_tensors), data.draw(st.integers(0, 2**20))
    output = data.draw(st.sampled_from([None, *DTYPES]))
    remainder = data.draw(st.sampled_from(REMAINDERS))
    if remainder is not None and output is not None:
        output = torch.bfloat16
    moments = data.draw(
        st.tuples(st.sampled_from(FIRST_MOMENT_DTYPES), st.sampled_from(SECOND_MOMENT_DTYPES))
    )
    odd, noisy = data.draw(st.booleans()), data.draw(st.booleans())
    ours = lists_of(seed, sizes, torch.bfloat16, output, KEYS[rule], odd, moments, remainder, noisy)
    dtype = ours.main[0].dtype if output is None else output
    weights = [main.to(dtype, copy=True) for main in ours.main]
    bitmaps = [torch.zeros(bitmap_bytes(n), dtype=torch.uint8) for n in sizes]
    ours = replace(ours, changed=bitmaps)
    if data.draw(st.booleans()):
        ours = into_other_memory(ours, seed + 1)
    group = {"lr": data.draw(st.sampled_from([1e-6, 1e-3])), "betas": (0.9, 0.999), "eps": 1e-8}
    group |= {"weight_decay": 0.0, "bias_correction": True, "adam_w_mode": True}
    group |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
    run(NativeBackend(LIBRARY), rule.split()[-1], ours, group, 1, 1.0)
    for before, main, made, bits in zip(weights, ours.main, ours.output, bitmaps, strict=True):
        after = main if made is None else made
        expected = torch.zeros(len(after), dtype=torch.bool)
        expected[bits_differ(before, after)] = True
        expected |= after.isnan()  # of which nobody knows the bits
        marked = bits_set(bits)
        assert marked[marked < len(after)].tolist() == expected.nonzero().view(-1).tolist()


def test_rounding_by_chance_is_left_to_no_torch_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    group |= {"bias_correction": True, "adam_w_mode": True}
    moments = torch.bfloat16, torch.uint8
    ours = lists_of(
        1, [300, 5], *[torch.bfloat16] * 2, KEYS["adam"], False, moments, torch.int16, noisy=True
    )
    monkeypatch.setattr(ReferenceBackend, "step", lambda *_: pytest.fail("torch operations"))
    run(NativeBackend(LIBRARY), "adam", ours, group, 1, 1.0)
    two_seeds = replace(ours, noise=[Noise(1, 0, 0), Noise(2, 0, 0)])
    with pytest.raises(pytest.fail.Exception, match="torch operations"):
        run(NativeBackend(LIBRARY), "adam", two_seeds, group, 1, 1.0)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes_of_tensors,
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(1, 8),
    st.integers(0, 2**20),
)
def test_sums_of_squares_equal_reference(
    sizes: list[int], dtype: torch.dtype, odd: bool, threads: int, seed: int
) -> None:
    set_host_threads(threads)
    grads = lists_of(seed, sizes, dtype, None, (), odd).grad
    assert_same(
        NativeBackend(LIBRARY).sum_of_squares(grads), REFERENCE.sum_of_squares(grads), "sums"
    )


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [131_072, 131_073, 1_000_003])
def test_large_tensors_do_not_depend_on_threads(n: int, threads: int) -> None:
    set_host_threads(threads)
    group = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "bias_correction": True,
        "adam_w_mode": True,
        "grad_averaging": True,
        "use_nvlamb": False,
    }
    for rule in ("adam", "lamb"):
        ours, theirs = (
            lists_of(3, [n, 5], torch.bfloat16, torch.bfloat16, KEYS[rule], False) for _ in range(2)
        )
        sums = [
            run(b, rule, ls, group, 1, 0.5)
            for b, ls in ((NativeBackend(LIBRARY), ours), (REFERENCE, theirs))
        ]
        assert_same_lists(ours, theirs)
        assert sums[0] is None or torch.equal(sums[0], sums[1])
    assert torch.equal(
        NativeBackend(LIBRARY).sum_of_squares(ours.grad), REFERENCE.sum_of_squares(theirs.grad)
    )


def test_streamed_outputs_are_the_same() -> None:
    """A launch of more than four million elements writes its output past the caches."""
    n = (4 << 20) + 17
    group = {"lr": 1e-2, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
    for dtype in (torch.bfloat16, torch.float16):
        ours, theirs = (lists_of(5, [n], dtype, dtype, (), True) for _ in range(2))
        for backend, lists in ((NativeBackend(LIBRARY), ours), (REFERENCE, theirs)):
            run(backend, "sgd", lists, group, 1, 1.0)
        assert_same_lists(ours, theirs)


def test_every_half_is_read_and_every_float_near_a_half_is_rounded_as_torch_does() -> None:
    group = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        main = torch.zeros(2**16)
        run(NativeBackend(LIBRARY), "sgd", TensorLists([main], [every], {}, [None]), group, 1, 1.0)
        assert_same(main, torch.zeros(2**16) - every.float(), "read")
        exact = every.float()
        exact = exact[exact.isfinite()]
        near = torch.cat(
            [torch.nextafter(exact, torch.tensor(s)) for s in (math.inf, -math.inf)]
            + [(exact[1:] + exact[:-1]) / 2, exact * (1 + 2**-12), exact * (1 + 2**-9)]
        )
        output = torch.empty(len(near), dtype=dtype)
        run(
            NativeBackend(LIBRARY),
            "sgd",
            TensorLists([near], [torch.zeros(len(near))], {}, [output]),
            group,
            1,
            1.0,
        )
        assert_same(output, near.to(dtype), "rounded")


def test_zeros_are_counted() -> None:
    for dtype in DTYPES:
        grad = torch.zeros(70_001, dtype=dtype)
        grad[::7] = 1.0
        numel, address = array("q", [grad.numel()]), array("Q", [grad.data_ptr()])
        tensors = MpTensors(
            count=1,
            numel=numel.buffer_info()[0],
            grad=address.buffer_info()[0],
            grad_dtype={torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}[dtype],  # api.h
        )
        sums, zeros = (torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.int64))
        LIBRARY.call("mp_measure", ctypes.byref(tensors), sums.data_ptr(), zeros.data_ptr(), 3)
        assert zeros.item() == int((grad == 0).sum()) and sums.item() == int((grad != 0).sum())


def test_fp64_gradients_and_mixed_dtypes_in_one_call() -> None:
    group = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "bias_correction": True,
        "adam_w_mode": True,
    }
    kinds = [
        (torch.float64, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, None),
        (torch.float16, torch.float32),
    ]
    parts = [
        lists_of(i, [900], dtype, output, KEYS["adam"], False)
        for i, (dtype, output) in enumerate(kinds)
    ]

    def joined(clone: bool) -> TensorLists:
        def copy(t: Tensor | None) -> Tensor | None:
            return t if t is None or not clone else t.clone()

        return TensorLists(
            *([copy(p.__getattribute__(name)[0]) for p in parts] for name in ("main", "grad")),
            {key: [copy(p.state[key][0]) for p in parts] for key in KEYS["adam"]},
            [copy(p.output[0]) for p in parts],
        )

    theirs, ours = joined(True), joined(False)
    run(REFERENCE, "adam", theirs, group, 1, 0.5)
    run(NativeBackend(LIBRARY), "adam", ours, group, 1, 0.5)
    assert_same_lists(ours, theirs)
    grads = [*ours.grad, torch.randn(40, 30).t()]
    assert torch.equal(
        NativeBackend(LIBRARY).sum_of_squares(grads), REFERENCE.sum_of_squares(grads)
    )


GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "bias_correction": True,
    "adam_w_mode": True,
}


@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("dtype", FIRST_MOMENT_DTYPES)
def test_compact_states_do_not_depend_on_threads(
    dtype: torch.dtype, remainder: torch.dtype | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = torch.uint8 if dtype == UINT4 else dtype
    theirs = lists_of(
        9, [150_000, 1], torch.bfloat16, None, KEYS["adam"], False, (dtype, second), remainder, True
    )
    run(REFERENCE, "adam", theirs, GROUP, 2, 0.5)
    monkeypatch.setattr(ReferenceBackend, "step", None)  # nothing is left to it
    for threads in (1, 3, 8):
        set_host_threads(threads)
        ours = lists_of(
            9,
            [150_000, 1],
            torch.bfloat16,
            None,
            KEYS["adam"],
            False,
            (dtype, second),
            remainder,
            True,
        )
        run(NativeBackend(LIBRARY), "adam", ours, GROUP, 2, 0.5)
        assert_same_lists(ours, theirs)


def test_scales_at_the_edges() -> None:
    """Blocks whose largest value is just below and above what is stored at all, and the largest
    there is."""
    tops = torch.tensor(
        [2.0**-100, 2.0**-100 * (1 - 2**-24), 2.0**-99, 3.4e38, 1.0, 127.0, 255.0, 0.0]
    )
    for dtype in (torch.float16, torch.uint8, UINT4):
        both = []
        for backend in (NativeBackend(LIBRARY), REFERENCE):
            n = 256 * len(tops)
            stored = stored_dtype("momentum_buffer", dtype)
            forms = moment_specs("momentum_buffer", torch.Size([n]), stored)
            state = {key: [torch.zeros(shape, dtype=kind)] for key, (shape, kind) in forms.items()}
            grad = tops.repeat_interleave(256) * torch.linspace(-1, 1, 256).repeat(len(tops))
            lists = TensorLists([torch.zeros(n)], [grad], state, [None])
            group = {
                "lr": 0.0,
                "momentum": 0.9,
                "dampening": 0.0,
                "nesterov": False,
                "weight_decay": 0.0,
            }
            run(backend, "sgd", lists, group, 1, 1.0)
            both.append(lists)
        assert_same_lists(*both)
        assert both[0].state["momentum_buffer_scale"][0].tolist()[1] == 0.0


def test_what_the_kernels_do_not_read_goes_to_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs beside a remainder that are not bfloat16, noise of several seeds; but not noise of a
    part of a tensor."""

    def lists(output: torch.dtype | None = None, noise: list[Noise] | None = None) -> TensorLists:
        made = lists_of(
            4,
            [300, 400],
            torch.bfloat16,
            output,
            KEYS["adam"],
            False,
            (torch.uint8,) * 2,
            torch.int16,
        )
        return TensorLists(made.main, made.grad, made.state, made.output, noise)

    step, by_reference = ReferenceBackend.step, []

    def counted(self: ReferenceBackend, rule: str, part: TensorLists, *arguments: Any) -> None:
        by_reference.append(len(part.main))
        step(self, rule, part, *arguments)

    monkeypatch.setattr(ReferenceBackend, "step", counted)
    for make, expected in (
        (lambda: lists(torch.float32), [2]),
        (lambda: lists(noise=[Noise(1, 2), Noise(2, 2)]), [2]),
        (lambda: lists(noise=[Noise(1, 2, 256), Noise(1, 3)]), []),
    ):
        ours, theirs = make(), make()
        by_reference.clear()
        run(NativeBackend(LIBRARY), "adam", ours, GROUP, 3, 0.5)
        assert by_reference == expected
        run(REFERENCE, "adam", theirs, GROUP, 3, 0.5)
        assert_same_lists(ours, theirs)


@pytest.mark.parametrize("output", [None, torch.bfloat16])
def test_written_parameters_are_known_to_autograd(output: torch.dtype | None) -> None:
    """Those of the model: the outputs, or main params that are its parameters themselves."""
    lists = lists_of(
        4, [300], torch.bfloat16, output, KEYS["adam"], False, (torch.uint8,) * 2, torch.int16
    )
    parameter = lists.main[0] if lists.output[0] is None else lists.output[0]
    version = parameter._version
    run(NativeBackend(LIBRARY), "adam", lists, GROUP, 3, 0.5)
    assert parameter._version > version and torch.equal(parameter, lists.main[0])


def test_calls_from_several_threads_do_not_mix() -> None:
    grads = [[torch.full((200_000,), float(i))] for i in range(1, 5)]
    found: dict[int, float] = {}

    def measure(i: int) -> None:
        for _ in range(20):
            found[i] = float(NativeBackend(LIBRARY).sum_of_squares(grads[i])[0])

    workers = [threading.Thread(target=measure, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {i: 200_000.0 * (i + 1) ** 2 for i in range(4)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    """OpenMP's threads and ours stay with the parent: a child that waited for them would hang."""
    grads = [torch.full((300_000,), 2.0)]
    set_host_threads(2)
    assert float(NativeBackend(LIBRARY).sum_of_squares(grads)[0]) == 1.2e6
    child = os.fork()
    if child == 0:
        found = float(NativeBackend(LIBRARY).sum_of_squares(grads)[0])
        os._exit(0 if found == 1.2e6 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_bad_arguments_are_python_errors() -> None:
    with pytest.raises(RuntimeError, match="mp_measure: a null pointer"):
        LIBRARY.call("mp_measure", None, None, None, 1)
    with pytest.raises(ValueError, match="MP_OPTIM_NATIVE='avx1024': this machine has"):
        LIBRARY.set_level("avx1024")
    with pytest.raises(ValueError, match="no native kernels"):
        NativeLibrary(None, "why").set_level("avx2")


def test_library_has_no_kernels_when_the_cpu_has_no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an x86-64 CPU without AVX2: torch operations take the steps."""
    empty = SimpleNamespace(
        mp_abi=lambda: native_library_file._ABI, mp_level=lambda: b"", mp_levels=lambda: b""
    )
    monkeypatch.setattr(native_library_file.ctypes, "CDLL", lambda path: empty)
    found = native_library_file._load(Path("_native.so"))
    assert found.handle is None and "none of AVX2, AVX-512 and NEON" in found.why


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_threads_are_pinned_to_cores_that_there_are() -> None:
    available = sorted(os.sched_getaffinity(0))
    grads = [torch.full((300_000,), 2.0)]
    set_host_threads(3)
    set_host_cores(available[-1:])
    try:
        assert float(NativeBackend(LIBRARY).sum_of_squares(grads)[0]) == 1.2e6
        pinned = [
            os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()
        ]
        assert len(available) == 1 or pinned.count({available[-1]}) >= 2
    finally:
        set_host_cores([])
    message = rf"host_cores=.*: this process may not run on core 99999; it has \[{available[0]}"
    with pytest.raises(ValueError, match=message):
        set_host_cores([available[0], 99999])
    with pytest.raises(ValueError, match=message):
        get_megatron_optimizer(OptimizerConfig(lr=1e-3, host_cores=(99999,)), torch.nn.Linear(2, 2))


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
def test_a_step_needs_next_to_no_memory_of_its_own() -> None:
    def kibibytes(field: str) -> int:
        return int(
            next(
                line for line in STATUS.read_text().splitlines() if line.startswith(field)
            ).split()[1]
        )

    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.full((20_000_000,), 0.5, dtype=torch.bfloat16))]
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(bf16=True, lr=1e-3), model)
    model[0].grad = torch.full_like(model[0], 0.1)
    optimizer.step()
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    before = kibibytes("VmRSS")
    optimizer.step()
    assert kibibytes("VmHWM") - before < 1024 * (host_share().threads + 1)
