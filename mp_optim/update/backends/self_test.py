"""Self-test of a backend: tiny steps of each rule on a device, compared with ``reference``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mp_optim.config.capabilities import CAPABILITIES, Capability
from mp_optim.config.rules import RULES
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots.state_keys import REMAINDER
from mp_optim.update.backends.interface import Backend, step_with
from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.kernel_args import TensorLists

MOST_ULPS, MOST_LR = 4.0, 1e-4
"""How far a usable backend's parameters may be from reference's after the two steps: ulps, plus
units of lr."""

MOST_RELATIVE = 1e-4
"""The same for moments and sums of squares, relative to the largest."""

BFLOAT16_MOMENTS, REMAINDERS = "bfloat16 moments", "remainders"
"""Forms of state beside FP32 that a proof tries."""

_LR = 0.01
_SETTINGS = {"lr": _LR, "weight_decay": 0.1}
_SIZES = (0, 1, 257, 1500)


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
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
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
    at = torch.arange(count, dtype=torch.float64, device="cpu") + phase
    return (
        ((torch.sin(at * 1.7) + 0.1) * torch.exp2(-4 * torch.cos(at * 0.3) ** 2))
        .float()
        .to(device)
    )


def _lists(
    rule: str, grad: torch.dtype, output: torch.dtype | None, device: torch.device
) -> TensorLists:
    mains = [
        _values(size, 5.0 + 0.1 * index, device) for index, size in enumerate(_SIZES)
    ]
    grads = [
        _values(size, 0.7 + index, device).to(grad) for index, size in enumerate(_SIZES)
    ]
    state = {
        key: list(map(torch.zeros_like, mains)) for key in RULES[rule].moment_names
    }
    outputs = [
        None if output is None else torch.zeros_like(p, dtype=output) for p in mains
    ]
    return TensorLists(mains, grads, state, outputs)


def _step(
    backend: Backend, rule: str, lists: TensorLists, step: int, multiplier: float
) -> None:
    step_with(
        backend, rule, lists, {**_SETTINGS, **RULES[rule].sample}, step, multiplier
    )


def _cases(
    rules: Sequence[str],
) -> Iterator[tuple[str, torch.dtype, torch.dtype | None, float]]:
    for rule in rules:
        yield rule, torch.float32, None, 1.0
        yield rule, torch.bfloat16, torch.bfloat16, 0.37


@in_own_modes
def compare(backend: Backend, device: torch.device, rules: Sequence[str]) -> Difference:
    """Two steps of each rule and the sums of squares, against ``reference`` on the same device."""
    found, reference = Difference(), ReferenceBackend()
    for rule, grad, output, multiplier in _cases(rules):
        ours, theirs = (_lists(rule, grad, output, device) for _ in range(2))
        for step in (1, 2):
            _step(backend, rule, ours, step, multiplier)
            _step(reference, rule, theirs, step, multiplier)
        difference(ours, theirs, _LR, found)
        found.others(
            backend.sum_of_squares(ours.grad), reference.sum_of_squares(ours.grad)
        )
    return found


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
    for form, claimed in (
        (BFLOAT16_MOMENTS, can.bfloat16_moments),
        (REMAINDERS, can.remainders),
    ):
        if "adam" not in claimed:
            continue
        ours, theirs = (
            _compact(
                _lists("adam", torch.bfloat16, torch.bfloat16, device),
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
    try:
        found = compare(backend, device, rules)
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
