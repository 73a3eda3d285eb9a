"""Self-test of a backend: tiny steps of each rule on a device, compared with ``reference``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.capabilities import CAPABILITIES, Capability
from mp_optim.config.rules import RULES, UINT4
from mp_optim.process.host_memory import zeros
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots.state_keys import AVERAGE, REMAINDER, SECOND, scale_key
from mp_optim.update.backends.interface import Backend, step_with
from mp_optim.update.backends.muon_trial import MuonTensors
from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.codecs import Noise, stored_dtype
from mp_optim.update.kernel_args import TensorLists, fp32
from mp_optim.update.state_format import moment_forms

MOST_ULPS, MOST_LR = 4.0, 1e-4
"""How far a usable backend's parameters may be from reference's after the two steps: ulps, plus
units of lr."""

MOST_RELATIVE = 1e-4
"""The same for moments and sums of squares, relative to the largest."""

BFLOAT16_MOMENTS, REMAINDERS = "bfloat16 moments", "remainders"
"""Forms of state beside FP32 that a proof tries."""

_LR = 0.01
_SETTINGS = {"lr": _LR, "weight_decay": 0.1}
_MULTIPLIER = fp32(0.37)
_PERIOD = 1009
"""Values repeat after so many: a prime, so that no block, tile or chunk equals its neighbour."""

SIZES = (0, 1, 257, 2048 + 5, 16384, 2 * 8192 + 2048 + 3)
"""Elements of the tensors that a backend is tried on.

NOTE: they follow the kernels, and change with them: a whole tile of Triton's is 2048 elements at
most, its chunks are 8192, those of its sums 16384; native's and the libraries' are smaller, or
65536 (``multi_tensor``), of which one is as good as another.
"""

INTERPRETED_SIZES = (0, 257)
"""The same where kernels are interpreted.

NOTE: there :data:`SIZES` take 13 seconds instead of 2, and nothing is compiled that could go wrong
from a whole tile on; the tests of Triton call :func:`compare` with them.
"""


@dataclass(frozen=True)
class SelfTest:
    """What was found out about a backend on a device of this process.

    Attributes:
        backend, device: which.
        usable: it can be loaded, and what it computes is right within the tolerances above.
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


@dataclass
class Difference:
    """Largest differences found so far: parameters in two units, and everything else relative to
    its largest value."""

    ulps: float = 0.0
    lrs: float = 0.0
    relative: float = 0.0
    excess: float = 0.0
    same: bool = True

    def params(self, ours: Tensor, theirs: Tensor, lr: float) -> None:
        """Compare parameters."""
        self.same &= _same(ours, theirs)
        if not ours.numel():
            return
        apart, top = (
            _largest((ours.double() - theirs.double()).abs()),
            float(theirs.double().abs().nan_to_num().max()),
        )
        unit = 2.0 ** (math.floor(math.log2(max(top, lr))) - 23)
        self.ulps, self.lrs = max(self.ulps, apart / unit), max(self.lrs, apart / lr)
        self.excess = max(self.excess, apart / (MOST_ULPS * unit + MOST_LR * lr))

    def others(
        self, ours: Tensor, theirs: Tensor, allowed: float = MOST_RELATIVE
    ) -> None:
        """Compare moments, outputs or sums."""
        self.same &= _same(ours, theirs)
        if ours.numel():
            top = max(float(theirs.double().abs().max()), 1e-30)
            found = _largest((ours.double() - theirs.double()).abs()) / top
            self.relative = max(self.relative, found)
            self.excess = max(self.excess, found / allowed)

    @property
    def tolerable(self) -> bool:
        """Whether everything is within the tolerances."""
        return self.excess <= 1.0


def _same(a: Tensor, b: Tensor) -> bool:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def _largest(values: Tensor) -> float:
    found = float(values.max())
    return math.inf if math.isnan(found) else found


def difference(
    ours: TensorLists, theirs: TensorLists, lr: float, found: Difference
) -> None:
    """Add what two sets of lists differ in."""
    for index, main in enumerate(ours.main):
        found.params(main, theirs.main[index], lr)
        output, other = ours.output[index], theirs.output[index]
        if output is not None and other is not None:
            found.others(output, other, 2.0**-7)  # one unit of bfloat16
        for key, tensors in ours.state.items():
            found.others(tensors[index], theirs.state[key][index])


def _values(count: int, phase: float, device: torch.device) -> Tensor:
    """Numbers of several magnitudes, the same on every device: nothing here may touch a random
    generator."""
    at = torch.arange(min(count, _PERIOD), dtype=torch.float64, device="cpu") + phase
    values = (torch.sin(at * 1.7) + 0.1) * torch.exp2(-4 * torch.cos(at * 0.3) ** 2)
    return values.float().repeat(-(-count // _PERIOD))[:count].to(device)


def _shifted(values: Tensor, dtype: torch.dtype, shift: int) -> Tensor:
    """A copy that begins ``shift`` elements into its storage."""
    memory = torch.zeros(len(values) + shift, dtype=dtype, device=values.device)
    return memory[shift:].copy_(values)


@dataclass(frozen=True)
class _Case:
    """What tensors a backend is tried on.

    Attributes:
        shift: how many elements into its storage each tensor begins.
    """

    rule: str
    grad: torch.dtype = torch.float32
    output: torch.dtype | None = None
    multiplier: float = 1.0
    shift: int = 0

    def lists(self, device: torch.device, sizes: Sequence[int]) -> TensorLists:
        """Fresh lists, the same at every call; their state is that of no step."""
        mains, grads, outputs = [], [], []
        for index, size in enumerate(sizes):
            main = _values(size, 5.0 + 0.1 * index, device)
            mains.append(_shifted(main, torch.float32, self.shift))
            grads.append(
                _shifted(_values(size, 0.7 + index, device), self.grad, self.shift)
            )
            outputs.append(
                None
                if self.output is None
                else _shifted(torch.zeros_like(main), self.output, self.shift)
            )
        state = {}
        for key in RULES[self.rule].moment_names:
            state[key] = [
                _shifted(main * 0.0, torch.float32, self.shift) for main in mains
            ]
        return TensorLists(mains, grads, state, outputs)


def _step(
    backend: Backend,
    rule: str,
    lists: TensorLists,
    step: int,
    multiplier: float | Tensor,
    **settings: float,
) -> None:
    group = {**_SETTINGS, **RULES[rule].sample, **settings}
    step_with(backend, rule, lists, group, step, multiplier)


def _cases(rules: Sequence[str]) -> Iterator[_Case]:
    for rule in rules:
        yield _Case(rule)
        yield _Case(rule, torch.bfloat16, torch.bfloat16, _MULTIPLIER)
        yield _Case(rule, torch.float16, torch.float16, _MULTIPLIER, shift=1)


@dataclass(frozen=True)
class _Trial:
    """A backend beside ``reference`` on one device; differences are added to ``found``."""

    backend: Backend
    device: torch.device
    sizes: Sequence[int]
    found: Difference

    def case(self, case: _Case) -> None:
        """Two steps and the sums of squares."""
        ours, theirs = (case.lists(self.device, self.sizes) for _ in range(2))
        self.steps(case, ours, theirs)
        difference(ours, theirs, _LR, self.found)
        sums = self.backend.sum_of_squares(ours.grad)
        self.found.others(sums, ReferenceBackend().sum_of_squares(ours.grad))

    def steps(self, case: _Case, ours: TensorLists, theirs: TensorLists) -> None:
        """Two steps of both."""
        for step in (1, 2):
            _step(self.backend, case.rule, ours, step, case.multiplier)
            _step(ReferenceBackend(), case.rule, theirs, step, case.multiplier)

    def denormals(self, rule: str) -> None:
        """Gradients whose second moments, and some whose first ones, are denormal, divided by an
        eps that hides nothing: who takes them for 0 is usable, but not exact."""
        case, apart = _Case(rule), Difference()
        ours, theirs = (case.lists(self.device, self.sizes[:3]) for _ in range(2))
        for lists in (ours, theirs):
            for main, grad in zip(lists.main, lists.grad, strict=True):
                main.zero_()
                grad.mul_(1e-20)[::3].mul_(1e-19)
        for backend, lists in ((self.backend, ours), (ReferenceBackend(), theirs)):
            _step(backend, rule, lists, 1, 1.0, eps=1e-30)
        difference(ours, theirs, _LR, apart)
        self.found.same &= apart.same

    def multipliers_on_the_device(self, rule: str) -> None:
        """A step with the multiplier there, then one whose flag says that nothing is to be
        written."""
        case = _Case(rule, torch.bfloat16, torch.bfloat16, _MULTIPLIER)
        ours, theirs = (case.lists(self.device, self.sizes) for _ in range(2))
        control = torch.tensor([_MULTIPLIER, 0.0], device="cpu").to(self.device)
        _step(self.backend, rule, ours, 1, control)
        _step(ReferenceBackend(), rule, theirs, 1, _MULTIPLIER)
        control[1:].fill_(1.0)
        _step(self.backend, rule, ours, 2, control)
        difference(ours, theirs, _LR, self.found)

    def muon(self) -> None:
        """Muon's passes over elements."""
        plain = _Case("adam").lists(self.device, self.sizes)
        ours, theirs = (MuonTensors.of(plain.main, plain.grad) for _ in range(2))
        ours.step(self.backend)
        theirs.step(ReferenceBackend())
        for stepped, expected in zip(ours.mains, theirs.mains, strict=True):
            self.found.params(stepped, expected, _LR)
        for mine, others in zip(ours[2:], theirs[2:], strict=True):
            for stepped, expected in zip(mine, others, strict=True):
                self.found.others(stepped, expected, 2.0**-7)

    def few_bits(self, first: torch.dtype) -> None:
        """Adam with the first moment in 8 or 4 bits and the rest of its state in 8, rounded
        stochastically."""
        case = _Case("adam", torch.bfloat16, None, _MULTIPLIER)
        ours, theirs = (
            _in_few_bits(case.lists(self.device, self.sizes), first) for _ in range(2)
        )
        self.steps(case, ours, theirs)
        difference(ours, theirs, _LR, self.found)


@in_own_modes
def compare(
    backend: Backend,
    device: torch.device,
    rules: Sequence[str],
    sizes: Sequence[int] = SIZES,
) -> Difference:
    """Steps of each rule and the sums of squares, against ``reference`` on the same device.

    Args:
        sizes: elements of the tensors; the first three should be small ones.
    """
    found = Difference()
    trial = _Trial(backend, device, sizes, found)
    for case in _cases(rules):
        trial.case(case)
    for rule in rules:
        if backend.takes_device_multipliers:
            trial.multipliers_on_the_device(rule)
        if found.same:
            trial.denormals(rule)
    trial.muon()
    if "adam" in rules and CAPABILITIES.get(backend.name, Capability()).compact:
        for first in (torch.uint8, UINT4):
            trial.few_bits(first)
    return found


def _in_few_bits(lists: TensorLists, first: torch.dtype) -> TensorLists:
    """The same with main params as bfloat16 beside 8-bit remainders, moments as codes, and averages
    in bfloat16, all with noise."""
    state: dict[str, Any] = {}
    for key, asked in (("exp_avg", first), (SECOND, torch.uint8)):
        dtype = stored_dtype(key, asked)
        forms = [moment_forms(key, main.shape, dtype) for main in lists.main]
        for name in (key, scale_key(key)):
            state[name] = [zeros(*each[name], lists.main[0].device) for each in forms]
    state[REMAINDER] = [torch.zeros_like(main, dtype=torch.int8) for main in lists.main]
    mains = [main.bfloat16() for main in lists.main]
    state[AVERAGE] = [main.flip(0).contiguous() for main in mains]
    noise = [Noise(0x9ABCDEF1, 77 + index) for index in range(len(mains))]
    weight = fp32(0.01)
    return TensorLists(
        mains, lists.grad, state, lists.output, noise, average_weight=weight
    )


def _compact(lists: TensorLists, bfloat16: bool, remainders: bool) -> TensorLists:
    """The same with moments in bfloat16, or main params as bfloat16 beside remainders."""
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    state = {
        key: [tensor.to(dtype) for tensor in tensors]
        for key, tensors in lists.state.items()
    }
    if not remainders:
        return TensorLists(lists.main, lists.grad, state, lists.output)
    mains = [main.bfloat16() for main in lists.main]
    state[REMAINDER] = [torch.zeros_like(main, dtype=torch.int16) for main in mains]
    return TensorLists(mains, lists.grad, state, lists.output)


@in_own_modes
def _lacks(backend: Backend, device: torch.device) -> dict[str, str]:
    """One Adam step with each form of state that the backend claims apart from FP32."""
    can, lacks = CAPABILITIES.get(backend.name, Capability()), {}
    case = _Case("adam", torch.bfloat16, torch.bfloat16)
    for form, claimed in (
        (BFLOAT16_MOMENTS, can.bfloat16_moments),
        (REMAINDERS, can.remainders),
    ):
        if "adam" not in claimed:
            continue
        ours, theirs = (
            _compact(
                case.lists(device, SIZES[:3]),
                form == BFLOAT16_MOMENTS,
                form == REMAINDERS,
            )
            for _ in range(2)
        )
        found = Difference()
        try:
            _step(backend, "adam", ours, 1, 1.0)
            _step(ReferenceBackend(), "adam", theirs, 1, 1.0)
            for index, main in enumerate(ours.main):
                found.others(
                    main,
                    theirs.main[index],
                    2.0**-7 if form == REMAINDERS else MOST_RELATIVE,
                )
                found.others(
                    ours.state["exp_avg"][index],
                    theirs.state["exp_avg"][index],
                    2.0**-7,
                )
        except Exception as error:
            lacks[form] = f"{type(error).__name__}: {error}"
        if not found.tolerable:
            lacks[form] = "a first step is wrong"
    return lacks


def prove(backend: Backend, device: torch.device) -> SelfTest:
    """Prove a backend on a device; an exception is a verdict too."""
    can = CAPABILITIES.get(backend.name, Capability()).rules
    rules = [rule for rule in can if RULES[rule].has_kernels]
    sizes = INTERPRETED_SIZES if backend.interpreted else SIZES
    try:
        found = compare(backend, device, rules, sizes)
    except Exception as error:
        return SelfTest(
            backend.name,
            str(device),
            False,
            False,
            math.nan,
            math.nan,
            f"fails a first step: {type(error).__name__}: {error}",
        )
    if found.same:
        return SelfTest(
            backend.name,
            str(device),
            True,
            True,
            0.0,
            0.0,
            "same bits as reference",
            _lacks(backend, device),
        )
    apart = f"differs from reference by {found.ulps:.3g} ulp, {found.lrs:.2g} lr"
    if not found.ulps:
        apart = "differs from reference in moments, outputs, sums or denormal numbers"
    usable = found.tolerable
    if not usable:
        apart = f"wrong: a first step {apart}, moments and sums by {found.relative:.2g}"
    return SelfTest(
        backend.name,
        str(device),
        usable,
        False,
        found.ulps,
        found.lrs,
        apart,
        _lacks(backend, device) if usable else {},
    )
