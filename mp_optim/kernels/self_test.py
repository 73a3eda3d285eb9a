"""Self-test of a backend before it writes a parameter.

The self-test compares a small step of each rule with ``reference``. The tests of the package cover
more sizes, alignments and dtypes. Triton's kernels are compiled on this machine, once for each form
(a kernel with its compile-time constants). Instead of this self-test, each form is compared when a
step first uses the form (:mod:`~mp_optim.kernels.triton.proofs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.config.rules import CAPABILITIES, RULES, Capability
from mp_optim.config.state_forms import BLOCK, blocks_of, packed_bytes
from mp_optim.core.slot_state import AVERAGE, REMAINDER, SECOND, is_scale, scale_key
from mp_optim.host.calls import in_own_modes
from mp_optim.kernels.codecs import Noise, encode_, is_packed, split_
from mp_optim.kernels.kernel_args import LaunchDtypes, MuonScalars, TensorLists, fp32
from mp_optim.kernels.reference import MOMENTUM, Backend, ReferenceBackend, step_with

MOST_RELATIVE, MOST_BFLOAT16 = 1e-4, 2.0**-7
"""Tolerances of a usable backend, relative to the largest element of a tensor: for FP32 and FP64
tensors, and for tensors with 16 bits or fewer."""
_REFUSED_CODE = ("kernel image", "unsupported toolchain", "unsupported PTX version")
"""Parts of driver messages about machine code that the driver does not support."""
_SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True}
_MULTIPLIER, _FACTOR = fp32(0.37), fp32(0.011)
# The tensor has a whole block and a partial block, because kernels treat them differently.
_SIZES = (BLOCK + 35,)

Trial = Callable[[Backend, TensorLists], Tensor | None]
"""Function that calls a method of a backend with tensor lists, and returns the method's result."""


@dataclass(frozen=True)
class SelfTest:
    """Result of the self-test of a backend on a device.

    Attributes:
        backend: name of the backend.
        device: device of the step.
        usable: True if the backend can be loaded and its results are within the tolerances.
        exact: True if its results have the bits of ``reference``.
        reason: the result in words.
    """

    backend: str
    device: str
    usable: bool
    exact: bool
    reason: str


@in_own_modes
def prove(backend: Backend, device: torch.device) -> SelfTest:
    """Test a backend on a device, and return the result. The result says that a backend that
    raises is unusable."""
    found: list[float] = []
    try:
        for form, trial in _trials(CAPABILITIES.get(backend.name, Capability())):
            lists = partial(trial_lists, form, device, _SIZES)
            found += differences(backend, lists, trial)
    except Exception as error:
        return SelfTest(backend.name, str(device), False, False, failure(error))
    worst = max(found, default=0.0)
    reason = f"differs from reference by {worst:.2g} of the tolerance"
    if worst > 1.0:
        reason = f"wrong: a first step {reason}"
    return SelfTest(
        backend.name,
        str(device),
        usable=worst <= 1.0,
        exact=not found,
        reason=reason if found else "same bits as reference",
    )


def differences(
    backend: Backend, make_lists: Callable[[], TensorLists], trial: Trial
) -> list[float]:
    """Return the differences from ``reference`` after a trial, in units of the tolerance.

    The result has an entry for each tensor with other bits.

    Args:
        backend: the backend to test.
        make_lists: function that returns tensor lists with equal values at every call.
        trial: function that calls the backend on the lists. It writes to the lists, or returns a
            tensor.
    """
    results: list[list[Tensor | None]] = []
    for each in (backend, ReferenceBackend()):
        lists = make_lists()
        returned = trial(each, lists)
        results.append([*lists.main, *lists.output, *chain(*lists.state.values()), returned])
    pairs = zip(*results, strict=True)
    found = (_apart(a, b) for a, b in pairs if a is not None and b is not None)
    return [apart for apart in found if apart is not None]


def _apart(ours: Tensor, theirs: Tensor) -> float | None:
    """Return the largest difference of two tensors in units of the tolerance; None if the bits are
    equal."""
    ours, theirs = ours.detach().cpu(), theirs.detach().cpu()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.itemsize]
    if torch.equal(ours.view(bits), theirs.view(bits)):
        return None
    top = max(float(theirs.double().abs().nan_to_num().max()), 1e-30)
    apart = float((ours.double() - theirs.double()).abs().max()) / top
    return (
        apart / (MOST_RELATIVE if ours.itemsize > 2 else MOST_BFLOAT16) if apart >= 0 else math.inf
    )


def failure(error: Exception) -> str:
    """Return the reason why a first step failed, with a remedy for outdated drivers."""
    why = f"fails a first step: {type(error).__name__}: {error}"
    if any(said in str(error) for said in _REFUSED_CODE):
        why += (
            ". Triton's assembler is newer than the driver: install a newer driver, or set "
            "TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH to the ptxas of a CUDA version that "
            "the driver supports"
        )
    return why


# -- trials ---------------------------------------------------------------------------------------


class TrialForm(NamedTuple):
    """Dtypes and options of a trial's tensor lists.

    Attributes:
        kind: dtypes of the tensors, without moments and scales.
        state: dtype of each moment and scale, by key.
        has_noise: True if state is rounded stochastically.
        average_weight: see ``TensorLists``.
        follows: see ``TensorLists``.
    """

    kind: LaunchDtypes
    state: Mapping[str, torch.dtype] = field(default_factory=dict)
    has_noise: bool = False
    average_weight: float = 1.0
    follows: bool = False


def _trials(can: Capability) -> Iterator[tuple[TrialForm, Trial]]:
    """Yield trials: a step of each rule, a step with compact state, sums of squares, and Muon's
    passes."""
    grad, fp32_ = torch.bfloat16, torch.float32
    plain = LaunchDtypes(grad, fp32_)
    for rule in (rule for rule in can.rules if RULES[rule].has_kernels):
        state = dict.fromkeys(RULES[rule].moment_names, fp32_)
        yield TrialForm(plain, state), partial(_step, rule)
    if can.compact:
        kind = LaunchDtypes(grad, torch.bfloat16, torch.int8, average=torch.bfloat16)
        # Use 4-bit codes for the first moment and 8-bit codes for the second moment, to test both
        # formats.
        codes = dict.fromkeys(("exp_avg", SECOND), torch.uint8)
        state = codes | dict.fromkeys(map(scale_key, codes), fp32_)
        yield TrialForm(kind, state, True, fp32(0.01)), partial(_step, "adam")
    yield TrialForm(LaunchDtypes(grad), {}), lambda backend, some: backend.sum_of_squares(some.grad)
    scalars = MuonScalars.at(_SETTINGS)
    yield (
        TrialForm(LaunchDtypes(grad, output=grad), {MOMENTUM: fp32_}),
        lambda backend, some: backend.muon_momentum(some, scalars, _MULTIPLIER),
    )
    yield (
        TrialForm(LaunchDtypes(grad, fp32_, output=grad), {}),
        lambda backend, some: backend.muon_apply(some, scalars, [_FACTOR] * len(some.main)),
    )


def _step(rule: str, backend: Backend, lists: TensorLists) -> None:
    group = {**_SETTINGS, **RULES[rule].defaults, **RULES[rule].trial}
    step_with(backend, rule, lists, group, 2, _MULTIPLIER)


@lru_cache(maxsize=32)
def values_of(count: int, stream: int, device: torch.device) -> Tensor:
    """Return FP32 numbers of several magnitudes, with the same bits on every machine and device.

    The numbers do not repeat with the period of a block, tile or chunk.

    NOTE: callers must not write to the cached tensor.
    """
    words = Noise(0x5EED, stream).words(count, device)
    whole = (words >> 8) - (1 << 23)
    return (whole >> (words & 7)).float() * 2.0**-23


def trial_lists(
    form: TrialForm,
    device: torch.device,
    sizes: Sequence[int],
    shift: int = 0,
    last_grad: float = 1.0,
) -> TensorLists:
    """Return tensor lists for a trial, with equal values at every call.

    Args:
        form: dtypes and options.
        device: device of all tensors.
        sizes: number of elements of each tensor.
        shift: number of elements between a multiple of 16 bytes and the start of each tensor.
        last_grad: factor of the last tensor's gradient. A tiny factor tests denormal squares.
    """
    kind, state = form.kind, dict[str, list[Tensor]]()
    whole = [values_of(size, 2 * index, device) for index, size in enumerate(sizes)]
    grads = [values_of(size, 2 * index + 1, device) for index, size in enumerate(sizes)]
    grads[-1] = grads[-1] * last_grad
    mains = [_shifted(value, kind.main, shift) for value in whole if kind.main is not None]
    if kind.remainder is not None:
        state[REMAINDER] = [_shifted(value * 0.0, kind.remainder, shift) for value in whole]
        for value, main, rest in zip(whole, mains, state[REMAINDER], strict=True):
            split_(value, main, rest)
    for key, dtype in form.state.items():
        if is_scale(key):
            continue
        scales: list[Any] = [None] * len(whole)
        if scale_key(key) in form.state:
            scales = [
                torch.zeros(blocks_of(size), dtype=torch.float32, device=device) for size in sizes
            ]
            state[scale_key(key)] = scales
        rooms = [packed_bytes(size) if is_packed(key, dtype) else size for size in sizes]
        state[key] = [
            _shifted(torch.zeros(room, dtype=torch.float32, device=device), dtype, shift)
            for room in rooms
        ]
        for value, stored, scale in zip(whole, state[key], scales, strict=True):
            before = value.square() * 2.0**-20 if key == SECOND else value * 0.25
            encode_(before, stored, scale, key == SECOND)
    if kind.average is not None:
        state[AVERAGE] = [_shifted(value.flip(0), kind.average, shift) for value in whole]
    outputs: list[Tensor | None] = [None] * len(whole)
    # Let some weights differ from their main params, because kernels have to continue from such
    # weights.
    if kind.output is not None:
        same = torch.arange(BLOCK, device=device) % 5 != 0
        weights = [each * same.repeat(blocks_of(len(each)))[: len(each)] for each in whole]
        outputs = [_shifted(value, kind.output, shift) for value in weights]
    noise = [Noise(0x9ABCDEF1, 77 + index, 256 * index) for index in range(len(whole))]
    return TensorLists(
        mains,
        [_shifted(value, kind.grad, shift) for value in grads],
        state,
        outputs,
        noise=noise if form.has_noise else None,
        average_weight=form.average_weight,
        follows=form.follows,
    )


def _shifted(values: Tensor, dtype: torch.dtype, shift: int) -> Tensor:
    """Return a copy that starts ``shift`` elements after the start of its storage."""
    memory = torch.zeros(len(values) + shift, dtype=dtype, device=values.device)
    return memory[shift:].copy_(values)
