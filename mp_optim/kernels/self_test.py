"""Self-test of a backend: one step of each rule on a device, before it writes a parameter.

Its bits are compared with recorded ones. Where they differ, the differences from ``reference`` on
the same device decide whether the backend is usable. The tests have more sizes, alignments and
dtypes, and so has :mod:`~mp_optim.kernels.triton.proofs` for kernels that are compiled here.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.rules import CAPABILITIES, KERNEL_RULES, RULES, Capability
from mp_optim.config.state_forms import UINT4
from mp_optim.core.slot_state import AVERAGE, REMAINDER, SECOND, scale_key
from mp_optim.host.calls import in_own_modes
from mp_optim.host.host_memory import zeros
from mp_optim.kernels.codecs import Noise, stored_dtype
from mp_optim.kernels.kernel_args import MuonScalars, TensorLists, fp32
from mp_optim.kernels.reference import MOMENTUM, Backend, ReferenceBackend, step_with
from mp_optim.kernels.state_format import moment_specs

BFLOAT16_MOMENTS, REMAINDERS = "bfloat16 moments", "remainders"
"""Forms of state beside FP32 that a proof tries."""

_REFUSED_CODE = ("kernel image", "unsupported toolchain", "unsupported PTX version")
"""What drivers say of code that they do not know."""

_LR = 0.01
_SETTINGS = {"lr": _LR, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True}
_MULTIPLIER, _FACTOR = fp32(0.37), fp32(0.011)
_BFLOAT16_UNIT = 2.0**-7

RECORDED = {
    **{rule: RULES[rule].checksum for rule in KERNEL_RULES},
    "sums": 0xE1117FF3,
    "few bits": 0xFC2532CF,
    "muon": 0x3554E791,
}
"""The checksum of what a step of each rule leaves behind, of Muon's passes, of a step with state in
few bits, and of sums of squares (:func:`digests`). They are the bits of docs/numerics.md, and so
change with it alone."""
_SIZE = 256 + 35  # a whole block of native's, and a part of one


@dataclass(frozen=True)
class SelfTest:
    """What was found out about a backend on a device of this process.

    Attributes:
        backend, device: which.
        usable: it can be loaded, and what it computes is right within the tolerances of
            :class:`Deviation`.
        exact: bit for bit what ``reference`` computes.
        ulps, lrs: largest difference of a parameter after two steps, in units in the last place of
            the largest parameter of its tensor, and in units of lr; NaN if it did not run.
        reason: the same for people.
        lacks: for each form of state that it should have kernels for and this installation has not,
            why; an older version of a library is usable without.
    """

    backend: str
    device: str
    usable: bool
    exact: bool
    ulps: float
    lrs: float
    reason: str
    lacks: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def unusable(cls, backend: str, device: torch.device, reason: str) -> SelfTest:
        return cls(backend, str(device), False, False, math.nan, math.nan, reason)


def prove(backend: Backend, device: torch.device) -> SelfTest:
    """Take one step of each rule; an exception is a verdict too."""
    try:
        if digests(_steps(backend, device, 2)).items() <= RECORDED.items():
            return _verdict(backend, device, Deviation(), {})
        found = Deviation()
        ours, theirs = (_steps(each, device, 1) for each in (backend, ReferenceBackend()))
        for name, lists in ours.items():
            allowed = _BFLOAT16_UNIT if name == "muon" else None
            for mine, other in zip(lists, theirs[name], strict=True):
                found.lists(mine, other, _LR, allowed)
    except Exception as error:
        return SelfTest.unusable(backend.name, device, failure(error))
    lacks = _lacks(backend, device) if found.tolerable else {}
    return _verdict(backend, device, found, lacks)


# -- steps and their verdict ----------------------------------------------------------------------


@in_own_modes
def _steps(backend: Backend, device: torch.device, step: int) -> dict[str, list[TensorLists]]:
    """Return the tensors that each key of :data:`RECORDED` is a checksum of, after its step.

    Args:
        step: 2, which is recorded, has moments, so that all of them count. 1 has none, so that
            differences of parameters are fractions of lr.
    """
    can, found = CAPABILITIES.get(backend.name, Capability()), {}
    for rule in (rule for rule in can.rules if RULES[rule].has_kernels):
        lists = _lists(rule, device)
        for key, (moment,) in lists.state.items() if step > 1 else ():
            moment.copy_(lists.main[0].square() * (2.0**-20 if key == SECOND else 1.0))
        _step(backend, rule, lists, step)
        found[rule] = [lists]
    sums = backend.sum_of_squares(_lists("adam", device).grad)
    found["sums"] = [TensorLists([], [], {"sums": [sums]}, [])]
    if can.compact:
        lists = _in_few_bits(_lists("adam", device), UINT4)
        _step(backend, "adam", lists, step)
        found["few bits"] = [lists]
    momenta, params = _muon_step(backend, device)
    found["muon"] = [params, replace(momenta, output=[])]
    return found


def digests(steps: Mapping[str, Sequence[TensorLists]]) -> dict[str, int]:
    """Return a checksum of the tensors of each step."""
    return {
        name: _digest(
            chain.from_iterable(
                [*lists.main, *lists.output, *chain(*lists.state.values())] for lists in every
            )
        )
        for name, every in steps.items()
    }


def _digest(tensors: Iterable[Tensor | None]) -> int:
    checksum = 0
    for tensor in tensors:
        if tensor is not None:
            checksum = zlib.crc32(bytes(tensor.cpu().view(torch.uint8).tolist()), checksum)
    return checksum


def failure(error: Exception) -> str:
    """Say why a first step by kernels fails."""
    why = f"fails a first step: {type(error).__name__}: {error}"
    if any(said in str(error) for said in _REFUSED_CODE):
        why += (
            ". The driver does not take what this Triton's assembler makes, which is newer: "
            "install a newer driver, or set TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH to "
            "the ptxas of a CUDA that the driver knows"
        )
    return why


def _verdict(
    backend: Backend, device: torch.device, found: Deviation, lacks: Mapping[str, str]
) -> SelfTest:
    apart = f"differs from reference by {found.ulps:.3g} ulp, {found.lrs:.2g} lr"
    if found.same:
        apart = "same bits as reference"
    elif not found.ulps:
        apart = "differs from reference in moments, outputs, sums or denormal numbers"
    usable = found.same or found.tolerable
    if not usable:
        apart = f"wrong: a first step {apart}, moments and sums by {found.relative:.2g}"
    name, where = backend.name, str(device)
    return SelfTest(name, where, usable, found.same, found.ulps, found.lrs, apart, lacks)


@in_own_modes
def _lacks(backend: Backend, device: torch.device) -> dict[str, str]:
    """One Adam step with each form of state that the backend claims apart from FP32."""
    can, lacks = CAPABILITIES.get(backend.name, Capability()), {}
    for form, claimed in ((BFLOAT16_MOMENTS, can.bfloat16_moments), (REMAINDERS, can.remainders)):
        if "adam" not in claimed:
            continue
        ours, theirs = (
            _compacted(_lists("adam", device), form == BFLOAT16_MOMENTS) for _ in range(2)
        )
        allowed = _BFLOAT16_UNIT if form == REMAINDERS else MOST_RELATIVE
        found = Deviation()
        try:
            _step(backend, "adam", ours, 1)
            _step(ReferenceBackend(), "adam", theirs, 1)
            for index, main in enumerate(ours.main):
                first, expected = ours.state["exp_avg"][index], theirs.state["exp_avg"][index]
                found.others(main, theirs.main[index], allowed)
                found.others(first, expected, _BFLOAT16_UNIT)
        except Exception as error:
            lacks[form] = f"{type(error).__name__}: {error}"
        if not found.tolerable:
            lacks[form] = "a first step is wrong"
    return lacks


def _step(backend: Backend, rule: str, lists: TensorLists, step: int) -> None:
    group = {**_SETTINGS, **RULES[rule].defaults, **RULES[rule].trial}
    step_with(backend, rule, lists, group, step, _MULTIPLIER)


def _muon_step(backend: Backend, device: torch.device) -> tuple[TensorLists, TensorLists]:
    """Take both passes of Muon, with rounded momenta as directions; return momenta and params."""
    plain = _lists("adam", device)
    rounded = [torch.zeros_like(grad) for grad in plain.grad]
    momenta = TensorLists([], plain.grad, {MOMENTUM: [0.25 * p for p in plain.main]}, rounded)
    params = TensorLists(plain.main, rounded, {}, [torch.zeros_like(grad) for grad in plain.grad])
    scalars = MuonScalars.at(_SETTINGS)
    backend.muon_momentum(momenta, scalars, _MULTIPLIER)
    backend.muon_apply(params, scalars, [_FACTOR] * len(params.main))
    return momenta, params


# -- tensors --------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def values_of(count: int, stream: int, device: torch.device) -> Tensor:
    """Numbers of several magnitudes, the same on every machine and device, none of which repeats
    with a block, tile or chunk; to be read only."""
    words = Noise(0x5EED, stream).words(count, device)
    whole = (words >> 8) - (1 << 23)
    return (whole >> (words & 7)).float() * 2.0**-23


def _lists(rule: str, device: torch.device) -> TensorLists:
    """Return lists of one tensor, equal at every call; their state is that of no step."""
    main, grad = (values_of(_SIZE, stream, device) for stream in (0, 1))
    state = {key: [torch.zeros_like(main)] for key in RULES[rule].moment_names}
    return TensorLists([main.clone()], [grad.bfloat16()], state, [None])


def _in_few_bits(lists: TensorLists, first: torch.dtype) -> TensorLists:
    """The same with main params as bfloat16 beside 8-bit remainders, moments as codes, and averages
    in bfloat16, all with noise."""
    state: dict[str, Any] = {}
    for key, asked in (("exp_avg", first), (SECOND, torch.uint8)):
        specs = [moment_specs(key, main.shape, stored_dtype(key, asked)) for main in lists.main]
        for name in (key, scale_key(key)):
            state[name] = [zeros(*each[name], lists.main[0].device) for each in specs]
    state[REMAINDER] = [torch.zeros_like(main, dtype=torch.int8) for main in lists.main]
    mains = [main.bfloat16() for main in lists.main]
    state[AVERAGE] = [main.flip(0).contiguous() for main in mains]
    noise = [Noise(0x9ABCDEF1, 77 + index) for index in range(len(mains))]
    weight = fp32(0.01)
    return TensorLists(mains, lists.grad, state, lists.output, noise, average_weight=weight)


def _compacted(lists: TensorLists, bfloat16: bool) -> TensorLists:
    """The same with moments in bfloat16, or main params as bfloat16 beside remainders."""
    if bfloat16:
        state = {key: [each.bfloat16() for each in tensors] for key, tensors in lists.state.items()}
        return TensorLists(lists.main, lists.grad, state, lists.output)
    mains = [main.bfloat16() for main in lists.main]
    rests = [torch.zeros_like(main, dtype=torch.int16) for main in mains]
    return TensorLists(mains, lists.grad, {**lists.state, REMAINDER: rests}, lists.output)


# -- differences ----------------------------------------------------------------------------------

MOST_ULPS, MOST_LR = 4.0, 1e-4
"""How far a usable backend's parameters may be from reference's after the two steps: ulps, plus
units of lr."""

MOST_RELATIVE = 1e-4
"""The same for moments and sums of squares, relative to the largest."""


@dataclass
class Deviation:
    """Largest differences found so far: parameters in two units, and everything else relative to
    its largest value."""

    ulps: float = 0.0
    lrs: float = 0.0
    relative: float = 0.0
    excess: float = 0.0
    same: bool = True

    def lists(
        self, ours: TensorLists, theirs: TensorLists, lr: float, allowed: float | None = None
    ) -> None:
        """Compare the tensors of two lists.

        Args:
            lr: unit of the differences of parameters.
            allowed: of moments, relative; :data:`MOST_RELATIVE` by default.
        """
        for main, expected in zip(ours.main, theirs.main, strict=True):
            self.params(main, expected, lr)
        for output, other in zip(ours.output, theirs.output, strict=True):
            if output is not None and other is not None:
                self.others(output, other, _BFLOAT16_UNIT)
        for key, tensors in ours.state.items():
            for tensor, other in zip(tensors, theirs.state[key], strict=True):
                self.others(tensor, other, allowed or MOST_RELATIVE)

    def params(self, ours: Tensor, theirs: Tensor, lr: float) -> None:
        """Compare parameters."""
        apart = self._apart(ours, theirs)
        if apart is None:
            return
        top = float(theirs.double().abs().nan_to_num().max())
        unit = 2.0 ** (math.floor(math.log2(max(top, lr))) - 23)
        self.ulps, self.lrs = max(self.ulps, apart / unit), max(self.lrs, apart / lr)
        self.excess = max(self.excess, apart / (MOST_ULPS * unit + MOST_LR * lr))

    def others(self, ours: Tensor, theirs: Tensor, allowed: float = MOST_RELATIVE) -> None:
        """Compare moments, outputs or sums."""
        apart = self._apart(ours, theirs)
        if apart is None:
            return
        apart /= max(float(theirs.double().abs().max()), 1e-30)
        self.relative = max(self.relative, apart)
        self.excess = max(self.excess, apart / allowed)

    def _apart(self, ours: Tensor, theirs: Tensor) -> float | None:
        """The largest difference, infinite where one is NaN; None if there is nothing to compare:
        the bits are the same, or there are no elements."""
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.itemsize]
        is_same = ours.dtype == theirs.dtype and torch.equal(ours.view(bits), theirs.view(bits))
        self.same &= is_same
        if is_same or not ours.numel():
            return None
        found = float((ours.double() - theirs.double()).abs().max())
        return math.inf if math.isnan(found) else found

    @property
    def tolerable(self) -> bool:
        """Whether everything is within the tolerances."""
        return self.excess <= 1.0
