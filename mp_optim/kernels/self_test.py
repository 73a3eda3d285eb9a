"""Self-test of a backend: tiny steps of each rule on a device, compared with ``reference``.

Two depths. :func:`prove` tries what kernels, compilers and libraries can get wrong: whole tiles and
tails, alignments, dtypes, denormals, codes, flags on a device. :func:`prove_by_a_step` takes each
rule's kernels over one tensor, whose bits are recorded here: for what was proven whole before it
came to this machine.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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

SIZES = (0, 1, 257, 1024 + 256 + 16, 16384, 2 * 8192 + 2048 + 3)
"""Elements of the tensors that a backend is tried on.

NOTE: they follow the kernels, and change with them: a whole tile of Triton's is 1024 elements, and
the rest of a tensor that ends at a multiple of 16 goes another way; its chunks are 8192, those of
its sums 16384; native's and the libraries' are smaller, or 65536 (``multi_tensor``), of which one
is as good as another.
"""

INTERPRETED_SIZES = (0, 257)
"""The same where kernels are interpreted.

NOTE: there :data:`SIZES` take 13 seconds instead of 2, and nothing is compiled that could go wrong
from a whole tile on; the tests of Triton call :func:`compare_steps` with them.
"""

RECORDED = {
    **{rule: RULES[rule].checksum for rule in KERNEL_RULES},
    "sums": 0xE1117FF3,
    "few bits": 0xFC2532CF,
    "muon": 0x3554E791,
}
"""The checksum of what a step of each rule leaves behind, of Muon's passes, of a step with state in
few bits, and of sums of squares (:func:`digests`). They are the bits of docs/numerics.md, and so
change with it alone."""
_RECORDED_SIZE = (256 + 35,)  # a whole block of native's, and a part of one


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
    """Prove a backend on a device; an exception is a verdict too."""
    sizes = INTERPRETED_SIZES if backend.interpreted else SIZES
    try:
        found = compare_steps(backend, device, _kernel_rules(backend), sizes)
    except Exception as error:
        return _failed(backend, device, error)
    lacks = _lacks(backend, device) if found.tolerable else {}
    return _verdict(backend, device, found, lacks)


def prove_by_a_step(backend: Backend, device: torch.device) -> SelfTest:
    """The same, by one step of each rule; by all of :func:`prove` where that has other bits than
    those recorded."""
    try:
        found = digests(backend, device)
    except Exception as error:
        return _failed(backend, device, error)
    if found.items() <= RECORDED.items():
        return _verdict(backend, device, Deviation(), {})
    return prove(backend, device)


# -- steps and their verdict ----------------------------------------------------------------------


@in_own_modes
def digests(backend: Backend, device: torch.device) -> dict[str, int]:
    """What :data:`RECORDED` is of. State is not that of a first step, so that all of it counts;
    outputs are those of Muon's second pass."""
    found = {}
    for rule in _kernel_rules(backend):
        lists = Case(rule, torch.bfloat16).lists(device, _RECORDED_SIZE)
        for key, (moment,) in lists.state.items():
            moment.copy_(lists.main[0].square() * (2.0**-20 if key == SECOND else 1.0))
        _step(backend, rule, lists, 2, _MULTIPLIER)
        found[rule] = _digest([*lists.main, *chain(*lists.state.values())])
    found["sums"] = _digest([backend.sum_of_squares(lists.grad)])
    lists = Case("adam", torch.bfloat16, first=UINT4).lists(device, _RECORDED_SIZE)
    _step(backend, "adam", lists, 2, _MULTIPLIER)
    found["few bits"] = _digest([*lists.main, *chain(*lists.state.values())])
    momenta, params = _muon_step(backend, device, _RECORDED_SIZE)
    found["muon"] = _digest([*params.main, *params.output, *chain(*momenta.state.values())])
    return found


def _digest(tensors: Iterable[Tensor | None]) -> int:
    checksum = 0
    for tensor in tensors:
        assert tensor is not None
        checksum = zlib.crc32(bytes(tensor.cpu().view(torch.uint8).tolist()), checksum)
    return checksum


def _kernel_rules(backend: Backend) -> list[str]:
    can = CAPABILITIES.get(backend.name, Capability()).rules
    return [rule for rule in can if RULES[rule].has_kernels]


def _failed(backend: Backend, device: torch.device, error: Exception) -> SelfTest:
    return SelfTest.unusable(backend.name, device, failure(error))


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
def compare_steps(
    backend: Backend, device: torch.device, rules: Sequence[str], sizes: Sequence[int] = SIZES
) -> Deviation:
    """Steps of each rule and the sums of squares, against ``reference`` on the same device.

    Args:
        sizes: elements of the tensors; the first three should be small ones.
    """
    found = Deviation()
    trial = _Trial(backend, device, sizes, found)
    for rule in rules:
        trial.steps(Case(rule))
        trial.steps(Case(rule, torch.bfloat16, torch.bfloat16, _MULTIPLIER))
        trial.steps(Case(rule, torch.float16, torch.float16, _MULTIPLIER, shift=1))
    for rule in rules:
        if backend.takes_device_multipliers:
            trial.multipliers_on_the_device(rule)
        if found.same:
            trial.denormals(rule)
    trial.muon()
    if "adam" in rules and CAPABILITIES.get(backend.name, Capability()).compact:
        for first in (torch.uint8, UINT4):
            trial.steps(Case("adam", torch.bfloat16, None, _MULTIPLIER, first=first))
    return found


@in_own_modes
def _lacks(backend: Backend, device: torch.device) -> dict[str, str]:
    """One Adam step with each form of state that the backend claims apart from FP32."""
    can, lacks = CAPABILITIES.get(backend.name, Capability()), {}
    case = Case("adam", torch.bfloat16, torch.bfloat16)
    for form, claimed in ((BFLOAT16_MOMENTS, can.bfloat16_moments), (REMAINDERS, can.remainders)):
        if "adam" not in claimed:
            continue
        ours, theirs = (
            _compacted(case.lists(device, SIZES[:3]), form == BFLOAT16_MOMENTS) for _ in range(2)
        )
        allowed = _BFLOAT16_UNIT if form == REMAINDERS else MOST_RELATIVE
        found = Deviation()
        try:
            _step(backend, "adam", ours, 1, 1.0)
            _step(ReferenceBackend(), "adam", theirs, 1, 1.0)
            for index, main in enumerate(ours.main):
                first, expected = ours.state["exp_avg"][index], theirs.state["exp_avg"][index]
                found.others(main, theirs.main[index], allowed)
                found.others(first, expected, _BFLOAT16_UNIT)
        except Exception as error:
            lacks[form] = f"{type(error).__name__}: {error}"
        if not found.tolerable:
            lacks[form] = "a first step is wrong"
    return lacks


def _step(
    backend: Backend,
    rule: str,
    lists: TensorLists,
    step: int,
    multiplier: float | Tensor,
    **settings: float,
) -> None:
    group = {**_SETTINGS, **RULES[rule].defaults, **RULES[rule].trial, **settings}
    step_with(backend, rule, lists, group, step, multiplier)


# -- trials ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """A backend beside ``reference`` on one device; differences are added to ``found``."""

    backend: Backend
    device: torch.device
    sizes: Sequence[int]
    found: Deviation

    def steps(self, case: Case) -> None:
        """Two steps and the sums of squares."""
        ours, theirs = (case.lists(self.device, self.sizes) for _ in range(2))
        sums = self.backend.sum_of_squares(ours.grad)
        self.found.others(sums, ReferenceBackend().sum_of_squares(ours.grad))
        for step in (1, 2):
            _step(self.backend, case.rule, ours, step, case.multiplier)
            _step(ReferenceBackend(), case.rule, theirs, step, case.multiplier)
        self.found.lists(ours, theirs, _LR)

    def denormals(self, rule: str) -> None:
        """Gradients whose second moments, and some whose first ones, are denormal, divided by an
        eps that hides nothing: who takes them for 0 is usable, but not exact."""
        apart = Deviation()
        ours, theirs = (Case(rule).lists(self.device, self.sizes[:3]) for _ in range(2))
        for backend, lists in ((self.backend, ours), (ReferenceBackend(), theirs)):
            for main, grad in zip(lists.main, lists.grad, strict=True):
                main.zero_()
                grad.mul_(1e-20)[::3].mul_(1e-19)
            _step(backend, rule, lists, 1, 1.0, eps=1e-30)
        apart.lists(ours, theirs, _LR)
        self.found.same &= apart.same

    def multipliers_on_the_device(self, rule: str) -> None:
        """A step with the multiplier there, then one whose flag says that nothing is to be
        written."""
        case = Case(rule, torch.bfloat16, torch.bfloat16, _MULTIPLIER)
        ours, theirs = (case.lists(self.device, self.sizes) for _ in range(2))
        control = torch.tensor([_MULTIPLIER, 0.0], device="cpu").to(self.device)
        _step(self.backend, rule, ours, 1, control)
        _step(ReferenceBackend(), rule, theirs, 1, _MULTIPLIER)
        control[1:].fill_(1.0)
        _step(self.backend, rule, ours, 2, control)
        self.found.lists(ours, theirs, _LR)

    def muon(self) -> None:
        """Muon's passes over elements, with what is to be orthogonalised as the direction."""
        ours = _muon_step(self.backend, self.device, self.sizes)
        theirs = _muon_step(ReferenceBackend(), self.device, self.sizes)
        for mine, others in zip(ours, theirs, strict=True):
            self.found.lists(mine, others, _LR, _BFLOAT16_UNIT)


def _muon_step(
    backend: Backend, device: torch.device, sizes: Sequence[int]
) -> tuple[TensorLists, TensorLists]:
    """What both passes read and wrote: momenta, and params."""
    plain = Case("adam", torch.bfloat16, torch.bfloat16).lists(device, sizes)
    rounded = [torch.zeros_like(grad) for grad in plain.grad]
    momenta = TensorLists([], plain.grad, {MOMENTUM: [0.25 * p for p in plain.main]}, rounded)
    params = TensorLists(plain.main, rounded, {}, plain.output)
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


def shifted(values: Tensor, dtype: torch.dtype, shift: int) -> Tensor:
    """A copy that begins ``shift`` elements into its storage."""
    memory = torch.zeros(len(values) + shift, dtype=dtype, device=values.device)
    return memory[shift:].copy_(values)


@dataclass(frozen=True)
class Case:
    """What tensors a backend is tried on.

    Attributes:
        shift: how many elements into its storage each tensor begins.
        first: the first moment's form in 8 or 4 bits; the rest of the state is in 8 then, rounded
            stochastically.
    """

    rule: str
    grad: torch.dtype = torch.float32
    output: torch.dtype | None = None
    multiplier: float = 1.0
    shift: int = 0
    first: torch.dtype | None = None

    def lists(self, device: torch.device, sizes: Sequence[int]) -> TensorLists:
        """Fresh lists, the same at every call; their state is that of no step."""
        mains, grads = [], []
        for index, size in enumerate(sizes):
            main = values_of(size, 2 * index, device)
            mains.append(shifted(main, torch.float32, self.shift))
            grads.append(shifted(values_of(size, 2 * index + 1, device), self.grad, self.shift))
        outputs: list[Tensor | None] = [None] * len(mains)
        if self.output is not None:
            outputs = [shifted(main * 0.0, self.output, self.shift) for main in mains]
        state = {}
        for key in RULES[self.rule].moment_names:
            state[key] = [shifted(main * 0.0, torch.float32, self.shift) for main in mains]
        lists = TensorLists(mains, grads, state, outputs)
        return lists if self.first is None else _in_few_bits(lists, self.first)


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
        """Compare what two sets of lists hold.

        Args:
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
