"""Self-test of a backend: tiny steps of each rule on a device, compared with ``reference``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mp_optim.config.capabilities import CAPABILITIES, Capability
from mp_optim.config.rules import RULES, UINT4
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.update.backends.differences import (
    MOST_RELATIVE,
    Difference,
    difference,
)
from mp_optim.update.backends.interface import Backend, step_with
from mp_optim.update.backends.muon_trial import MuonTensors
from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.backends.trial_tensors import Case, compacted, in_few_bits
from mp_optim.update.kernel_args import TensorLists, fp32

BFLOAT16_MOMENTS, REMAINDERS = "bfloat16 moments", "remainders"
"""Forms of state beside FP32 that a proof tries."""

_LR = 0.01
_SETTINGS = {"lr": _LR, "weight_decay": 0.1}
_MULTIPLIER = fp32(0.37)

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
        usable: it can be loaded, and what it computes is right within the tolerances of
            ``differences``.
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


def _cases(rules: Sequence[str]) -> Iterator[Case]:
    for rule in rules:
        yield Case(rule)
        yield Case(rule, torch.bfloat16, torch.bfloat16, _MULTIPLIER)
        yield Case(rule, torch.float16, torch.float16, _MULTIPLIER, shift=1)


@dataclass(frozen=True)
class _Trial:
    """A backend beside ``reference`` on one device; differences are added to ``found``."""

    backend: Backend
    device: torch.device
    sizes: Sequence[int]
    found: Difference

    def case(self, case: Case) -> None:
        """Two steps and the sums of squares."""
        ours, theirs = (case.lists(self.device, self.sizes) for _ in range(2))
        self.steps(case, ours, theirs)
        difference(ours, theirs, _LR, self.found)
        sums = self.backend.sum_of_squares(ours.grad)
        self.found.others(sums, ReferenceBackend().sum_of_squares(ours.grad))

    def steps(self, case: Case, ours: TensorLists, theirs: TensorLists) -> None:
        """Two steps of both."""
        for step in (1, 2):
            _step(self.backend, case.rule, ours, step, case.multiplier)
            _step(ReferenceBackend(), case.rule, theirs, step, case.multiplier)

    def denormals(self, rule: str) -> None:
        """Gradients whose second moments, and some whose first ones, are denormal, divided by an
        eps that hides nothing: who takes them for 0 is usable, but not exact."""
        case, apart = Case(rule), Difference()
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
        case = Case(rule, torch.bfloat16, torch.bfloat16, _MULTIPLIER)
        ours, theirs = (case.lists(self.device, self.sizes) for _ in range(2))
        control = torch.tensor([_MULTIPLIER, 0.0], device="cpu").to(self.device)
        _step(self.backend, rule, ours, 1, control)
        _step(ReferenceBackend(), rule, theirs, 1, _MULTIPLIER)
        control[1:].fill_(1.0)
        _step(self.backend, rule, ours, 2, control)
        difference(ours, theirs, _LR, self.found)

    def muon(self) -> None:
        """Muon's passes over elements."""
        plain = Case("adam").lists(self.device, self.sizes)
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
        case = Case("adam", torch.bfloat16, None, _MULTIPLIER)
        ours, theirs = (
            in_few_bits(case.lists(self.device, self.sizes), first) for _ in range(2)
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


@in_own_modes
def _lacks(backend: Backend, device: torch.device) -> dict[str, str]:
    """One Adam step with each form of state that the backend claims apart from FP32."""
    can, lacks = CAPABILITIES.get(backend.name, Capability()), {}
    case = Case("adam", torch.bfloat16, torch.bfloat16)
    for form, claimed in (
        (BFLOAT16_MOMENTS, can.bfloat16_moments),
        (REMAINDERS, can.remainders),
    ):
        if "adam" not in claimed:
            continue
        ours, theirs = (
            compacted(
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
