"""Native and Triton kernels have the bits of ``reference`` for all sizes, alignments, values and
dtypes. Triton's kernels run in its interpreter if there is no GPU."""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mp_optim.config.state_forms import BLOCK
from mp_optim.core import CachedTensorList
from mp_optim.core.slot_state import scale_key
from mp_optim.kernels.kernel_args import LambScalars, TensorLists
from mp_optim.kernels.native import NativeBackend
from mp_optim.kernels.native_library import native_library, set_host_threads
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.triton import triton_backend
from mp_optim.kernels.triton.proofs import FormProofs
from support.kernel_bits import (
    FIRST,
    FLOATS,
    REFERENCE,
    assert_same,
    assert_same_lists,
    check,
    check_drawn,
    every_dtype,
    on_device,
    sizes_of_tensors,
)
from support.kernel_cases import GROUP, KEYS, ODD, PASSES, Case, lists_of, step_with

LIBRARY = native_library()
FOUND, WHY = triton_backend()
GPU = "cuda" if torch.cuda.is_available() else "cpu"
LEVELS = [pytest.param(level, marks=pytest.mark.native) for level in LIBRARY.levels]
NO_TRITON = pytest.mark.skipif(FOUND is None, reason=f"no Triton kernels: {WHY}")
TRITON = pytest.param("triton", marks=NO_TRITON)
PLAIN = {**GROUP, "momentum": 0.0, "weight_decay": 0.0}

# numpy warns in Triton's interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@dataclass(frozen=True)
class Kernels:
    """A backend, and the device of the tensors that the backend steps.

    Attributes:
        draws: number of cases; fewer for compiled or interpreted kernels.
    """

    backend: Any
    device: str = "cpu"
    draws: int = 5

    def check(self, rule: str, sizes: list[int], case: Case, **given: Any) -> None:
        check(self.backend, rule, sizes, case, device=self.device, **given)

    def both(self, rule: str, make: Any, group: dict[str, Any], step: int = 2) -> TensorLists:
        """Step two equal lists, by the tested backend and by ``reference``, compare the lists, and
        return the list of the tested backend."""
        ours, theirs = on_device(make(), self.device), make()
        sums = [
            step_with(backend, rule, lists, group, step, 0.5)
            for backend, lists in ((self.backend, ours), (REFERENCE, theirs))
        ]
        assert_same_lists(ours, theirs)
        assert_same(*sums, "sums")
        return ours


@pytest.fixture(params=[*LEVELS, TRITON])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    if request.param == "triton":
        monkeypatch.setattr(FOUND, "proofs", FormProofs())
        yield Kernels(FOUND, GPU, 1)
        return
    before = LIBRARY.level
    LIBRARY.set_level(request.param)
    yield Kernels(NativeBackend(LIBRARY))
    LIBRARY.set_level(before)
    set_host_threads(None)


of_kernels = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


@of_kernels
@given(st.data())
@pytest.mark.parametrize("rule", list(PASSES))
def test_kernels_have_bits_of_reference_for_random_cases(kernels, rule, data):
    most = 12_000 if kernels.backend is FOUND else 70_000
    for _ in range(kernels.draws):
        set_host_threads(data.draw(st.integers(1, 8)))
        check_drawn(kernels.backend, rule, data, kernels.device, most)


@pytest.mark.parametrize("case", every_dtype, ids=str)
def test_kernels_have_bits_of_reference_for_every_dtype(kernels, case):
    rules = list(KEYS)
    for rule in {"adam", rules[every_dtype.index(case) % len(rules)]}:
        kernels.check(rule, [700, 3], case)


@pytest.mark.parametrize("rule", ["adam", "lamb"])
def test_kernels_step_shards_without_reference_when_rounding_is_stochastic(
    kernels, rule, monkeypatch
):
    compact = Case(torch.float32, None, torch.int8, (torch.int8, torch.uint8))
    for case in (
        replace(compact, average=torch.bfloat16),
        Case(moments=(torch.bfloat16, torch.bfloat16), average=torch.float32),
    ):
        case = replace(case, noisy=True, inside=True)
        ours, theirs, plain = (
            lists_of(1, [700, 3, 9000, 300], KEYS[rule], each)
            for each in (case, case, replace(case, inside=False))
        )
        step_with(REFERENCE, rule, theirs, GROUP, 2, 0.375)
        step_with(REFERENCE, rule, plain, GROUP, 2, 0.375)
        first = [lists.state["exp_avg"] for lists in (theirs, plain)]
        assert list(map(torch.equal, *first)) == [False, True, False, False]
        with monkeypatch.context() as alone:
            for method in ("step", "lamb_moments", "lamb_apply"):
                alone.setattr(ReferenceBackend, method, lambda *_: pytest.fail("by reference"))
            ours = on_device(ours, kernels.device)
            step_with(kernels.backend, rule, ours, GROUP, 2, 0.375)
        assert_same_lists(ours, theirs)


def test_kernels_have_bits_of_reference_for_zeros_denormals_and_nan(kernels):
    tops = [0.0, 1e-45, 1e-40, 2.0**-100, 2.0**-101, 2.0**-100 * (1 - 2**-24), 2.0**-99]
    tops += [1.0, 127.0, 255.0, 3e38, 3.4e38, math.inf, math.nan]
    rows = torch.tensor(tops)[:, None] * torch.linspace(-1, 1, BLOCK)
    x = torch.cat([rows.flatten(), torch.tensor(ODD)])
    group = {**PLAIN, "momentum": 0.5, "betas": (0.5, 0.5)}
    forms = [*zip(FIRST, [*FLOATS, torch.uint8, torch.uint8], strict=True)]
    for moments, noisy in product(forms, (False, True)):

        def make(moments: Any = moments, noisy: bool = noisy) -> TensorLists:
            case = Case(torch.float32, None, None, moments, noisy)
            lists = lists_of(1, [len(x)], KEYS["adam"], case)
            lists.grad[0].copy_(x)
            return lists

        kernels.both("adam", make, group, 1)


@pytest.mark.parametrize("second", [torch.float16, torch.uint8])
def test_kernels_store_a_tiny_second_moment_as_the_smallest_code(kernels, second):
    def make() -> TensorLists:
        case = Case(torch.float32, None, None, (torch.float32, second))
        lists = lists_of(1, [BLOCK], KEYS["adam"], case)
        lists.grad[0].fill_(1e-12)[0] = 1e6
        for key in ("exp_avg_sq", scale_key("exp_avg_sq")):
            lists.state[key][0].zero_()
        return lists

    codes = kernels.both("adam", make, GROUP, 1).state["exp_avg_sq"][0]
    assert (codes.view(torch.int16) if second == torch.float16 else codes).min() == 1


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_read_every_16_bit_float_and_round_like_torch(kernels, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    read = lambda: TensorLists([torch.zeros(2**16)], [every], {}, [None])  # noqa: E731
    main = kernels.both("sgd", read, {**PLAIN, "lr": 1.0}, 1).main[0].cpu()
    assert_same(main, torch.zeros(2**16) - every.float() * 0.5, "read")
    exact = every.float()
    exact = exact[exact.isfinite()]
    near = torch.cat(
        [torch.nextafter(exact, torch.tensor(s)) for s in (math.inf, -math.inf)]
        + [(exact[1:] + exact[:-1]) / 2, exact * (1 + 2**-12), exact * (1 + 2**-9)]
    )[:: 13 if kernels.backend is FOUND and GPU == "cpu" else 1]

    def written() -> TensorLists:
        zeros = torch.zeros(len(near))
        return TensorLists([near.clone()], [zeros], {}, [zeros.to(dtype)])

    assert_same(kernels.both("sgd", written, PLAIN, 1).output[0], near.to(dtype), "rounded")


@pytest.mark.parametrize("rule", ["adam", "lamb", "lion", "sgd"])
def test_kernels_have_bits_of_reference_for_fp64_and_mixed_gradients(kernels, rule):
    kinds = [Case(torch.float64, None), Case(), Case(torch.float32, None)]
    kinds += [Case(torch.float16, torch.float32), Case()]

    def joined() -> TensorLists:
        parts = [lists_of(at, [900], KEYS[rule], case) for at, case in enumerate(kinds)]
        return TensorLists(
            [part.main[0] for part in parts],
            [part.grad[0] for part in parts],
            {key: [part.state[key][0] for part in parts] for key in KEYS[rule]},
            [part.output[0] for part in parts],
        )

    kernels.both(rule, joined, GROUP)
    if kernels.backend.takes_device_multipliers and rule != "lamb":
        skipped = on_device(joined(), kernels.device)
        skip = torch.tensor([1.0, 1.0], device=kernels.device)
        step_with(kernels.backend, rule, skipped, GROUP, 2, skip)
        assert_same_lists(skipped, joined())


@of_kernels
@given(
    sizes_of_tensors, st.sampled_from(FLOATS), st.booleans(), st.booleans(), st.integers(0, 2**20)
)
def test_sum_of_squares_equals_reference_for_random_sizes(
    kernels, sizes, dtype, odd, aligned, seed
):
    set_host_threads(1 + seed % 8)
    grads = lists_of(seed, sizes, (), Case(dtype, odd=odd, aligned=aligned)).grad
    ours = [grad.to(kernels.device) for grad in grads]
    expected = REFERENCE.sum_of_squares(grads)
    assert_same(kernels.backend.sum_of_squares(ours), expected, "sums")


def test_sum_of_squares_equals_reference_for_strided_and_empty_tensors(kernels):
    tensors = [torch.randn(40, 30).t(), torch.randn(5).double(), torch.randn(2000).half()]
    tensors += [torch.zeros(0), torch.randn(7).bfloat16()]
    ours = kernels.backend.sum_of_squares([tensor.to(kernels.device) for tensor in tensors])
    assert_same(ours, REFERENCE.sum_of_squares(tensors), "sums")
    assert kernels.backend.sum_of_squares([]).shape == (0,)
    nothing = on_device(lists_of(1, [0, 0], KEYS["lamb"], Case()), kernels.device)
    found = kernels.backend.lamb_moments(nothing, LambScalars.at(GROUP, 1), 1.0)
    assert torch.equal(found.cpu(), torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("output", [torch.bfloat16, torch.float32])
def test_repeated_launch_reads_new_gradients_and_written_weights(kernels, output):
    case = Case(output=output, aligned=True)
    theirs = replace(lists_of(1, [700, 3], KEYS["adam"], case), follows=True)
    for main, out in zip(theirs.main, theirs.output, strict=True):
        out.copy_(main)
    ours = on_device(deepcopy(theirs), kernels.device)
    ours = replace(
        ours,
        main=CachedTensorList(ours.main),
        state={key: CachedTensorList(tensors) for key, tensors in ours.state.items()},
        output=CachedTensorList(ours.output),
        prepared={},
    )
    grads = [lists_of(seed, [700, 3], (), case).grad for seed in (2, 3)]
    moved = [[grad.to(kernels.device) for grad in some] for some in grads]
    for step in range(1, 6):
        if step > 3:  # Both sets of gradients have been launched before.
            theirs.output[0][5 + step], ours.output[0][5 + step] = 0.5, 0.5
        ours = replace(ours, grad=CachedTensorList(moved[step % 2]))
        step_with(kernels.backend, "adam", ours, GROUP, step, 0.5)
        step_with(REFERENCE, "adam", replace(theirs, grad=grads[step % 2]), GROUP, step, 0.5)
        assert_same_lists(ours, theirs)
    assert list(ours.prepared or ()) == ["adam"]
