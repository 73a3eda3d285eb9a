"""What a backend is handed: parallel lists of tensors, and scalars rounded once from double."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mp_optim.slots.state_keys import AVERAGE, REMAINDER
from mp_optim.update.codecs import Noise

_LEAST_NORMAL = 2.0**-126
MAIN = ""
"""Key of main params among a slot's tensors."""


def fp32(value: float) -> float:
    """The double that is nearest to ``value`` among FP32 numbers."""
    return ctypes.c_float(value).value


@dataclass(frozen=True, slots=True)
class TensorLists:
    """Parallel lists on one device, of contiguous tensors.

    Attributes:
        main: FP32; or bfloat16, with the rest of it in ``state[REMAINDER]``. Empty for a pass that
            steps none.
        grad: any floating dtype.
        state: moments by name, stored as ``formats`` says, with ``state[scale_key(name)]`` for
            those in blocks; ``state[AVERAGE]``, where averages are kept.
        output: tensor that receives the updated parameter in its dtype, or None; bfloat16 beside a
            remainder.
        source: where the present values of main (``MAIN``) and state are, if not in ``main`` and
            ``state``, whose values then mean nothing. Only for backends that have ``reads_source``.
        noise: for each tensor, to round state stochastically; None rounds to nearest.
        average_weight: what new main params weigh in their averages, an FP32 number; at 1 the
            averages become the main params.

    A list that is a ``CachedTensorList`` may be the same one in every step.
    """

    main: list[Tensor]
    grad: list[Tensor]
    state: dict[str, list[Tensor]]
    output: Sequence[Tensor | None]
    noise: list[Noise] | None = None
    source: Mapping[str, Sequence[Tensor]] | None = None
    average_weight: float = 1.0

    def take(self, indices: Sequence[int]) -> TensorLists:
        """Some of the tensors."""

        def some(values: Sequence[Any]) -> list[Any]:
            return [values[index] for index in indices]

        source = self.source
        return TensorLists(
            some(self.main) if self.main else [],
            some(self.grad),
            {key: some(tensors) for key, tensors in self.state.items()},
            some(self.output),
            None if self.noise is None else some(self.noise),
            None
            if source is None
            else {key: some(each) for key, each in source.items()},
            self.average_weight,
        )

    def for_averages(self) -> TensorLists:
        """The lists without what averages do not read; empty ones where none are kept."""
        if AVERAGE not in self.state or not self.main:
            return TensorLists([], [], {}, [])
        names = (REMAINDER, AVERAGE)
        kept = {key: self.state[key] for key in names if key in self.state}
        none = [None] * len(self.main)
        return replace(self, state=kept, output=none, source=None)

    def in_place(self) -> TensorLists:
        """The lists with present values brought to where they are stepped."""
        if self.source is None:
            return self
        for key, tensors in self.source.items():
            if tensors:
                torch._foreach_copy_(
                    list(self.main if key == MAIN else self.state[key]), list(tensors)
                )
        return replace(self, source=None)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the scalars of a step were made from, for kernels that make their own."""

    lr: float
    weight_decay: float
    step: int
    bias_correction: bool

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> StepInputs:
        """From a param group; numbers may be tensors there."""
        return cls(
            float(group["lr"]),
            float(group["weight_decay"]),
            int(step),
            bool(group["bias_correction"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Apart from the scalars themselves, so that those are what ``__slots__`` of a subclass
    lists."""

    given: StepInputs


@dataclass(frozen=True, slots=True)
class AdamScalars(_Made):
    """Scalars of one Adam step: FP32 values formed in double."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float
    inv_sqrt_bias2: float
    decay: float
    l2: float

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> AdamScalars:
        """From a param group's ``lr``, ``betas``, ``eps``, ``weight_decay`` and flags, at step
        ``step`` >= 1."""
        (beta1, beta2), lr = (float(b) for b in group["betas"]), float(group["lr"])
        bias1, bias2 = _bias_corrections(group, beta1, beta2, step)
        decay, decoupled = float(group["weight_decay"]), group["adam_w_mode"]
        return cls(
            fp32(beta1),
            fp32(1 - beta1),
            fp32(beta2),
            fp32(1 - beta2),
            fp32(group["eps"]),
            fp32(lr / bias1),
            fp32(1 / math.sqrt(bias2)),
            fp32(lr * decay) if decoupled else 0.0,
            0.0 if decoupled else fp32(decay),
            given=StepInputs.at(group, step),
        )


@dataclass(frozen=True, slots=True)
class StableScalars(_Made):
    """Scalars of one step of StableAdamW: those of Adam with decoupled decay, and beside them

    Attributes:
        floor: least second moment that a square is divided by.
        limit: a power of two that no such quotient reaches, but by rounding of denormal numbers;
            what stands for one whose square overflows.
        rate, decay_rate: of a parameter that is not clipped, before they are rounded to
            ``step_size`` and ``decay``.
    """

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    inv_bias2: float
    inv_sqrt_bias2: float
    floor: float
    limit: float
    step_size: float
    decay: float
    rate: float
    decay_rate: float

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> StableScalars:
        """From a param group, at step ``step`` >= 1."""
        (beta1, beta2), lr = (float(b) for b in group["betas"]), float(group["lr"])
        bias1, bias2 = _bias_corrections(group, beta1, beta2, step)
        rate, decay_rate = lr / bias1, lr * float(group["weight_decay"])
        most = bias2 / (
            1 - beta2
        )  # v >= (1 - beta2) g^2, so g^2 / (v / bias2) is at most this
        return cls(
            fp32(beta1),
            fp32(1 - beta1),
            fp32(beta2),
            fp32(1 - beta2),
            fp32(group["eps"]),
            fp32(1 / bias2),
            fp32(1 / math.sqrt(bias2)),
            fp32(max(float(group["eps"]) ** 2, _LEAST_NORMAL)),
            2.0 ** math.frexp(most)[1],
            fp32(rate),
            fp32(decay_rate),
            rate,
            decay_rate,
            given=StepInputs.at(group, step),
        )


@dataclass(frozen=True, slots=True)
class LambScalars(_Made):
    """Scalars of one LAMB step."""

    beta1: float
    grad_weight: float
    beta2: float
    one_minus_beta2: float
    eps: float
    inv_bias1: float
    inv_sqrt_bias2: float
    decay: float
    l2: float
    lr: float
    adapts: bool

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> LambScalars:
        """From a param group, at step ``step`` >= 1."""
        beta1, beta2 = (float(b) for b in group["betas"])
        bias1, bias2 = _bias_corrections(group, beta1, beta2, step)
        decay, decoupled = float(group["weight_decay"]), group["adam_w_mode"]
        return cls(
            fp32(beta1),
            fp32(1 - beta1) if group["grad_averaging"] else 1.0,
            fp32(beta2),
            fp32(1 - beta2),
            fp32(group["eps"]),
            fp32(1 / bias1),
            fp32(1 / math.sqrt(bias2)),
            fp32(decay) if decoupled else 0.0,
            0.0 if decoupled else fp32(decay),
            float(group["lr"]),
            bool(group["use_nvlamb"] or decay != 0.0),
            given=StepInputs.at(group, step),
        )

    def ratio(self, param_square: float, update_square: float) -> float:
        """lr * ||p|| / ||u|| where the rule adapts and both norms are positive, else lr."""
        if not self.adapts or param_square == 0.0 or update_square == 0.0:
            return fp32(self.lr)
        return fp32(self.lr * math.sqrt(param_square) / math.sqrt(update_square))


@dataclass(frozen=True, slots=True)
class SgdScalars:
    """Scalars of one SGD step; ``first`` says that the momentum buffer starts with this
    gradient."""

    lr: float
    momentum: float
    one_minus_dampening: float
    decay: float
    nesterov: bool
    first: bool

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> SgdScalars:
        """From a param group, at step ``step`` >= 1."""
        return cls(
            fp32(float(group["lr"])),
            fp32(group["momentum"]),
            fp32(1 - group["dampening"]),
            fp32(group["weight_decay"]),
            group["nesterov"],
            step == 1,
        )


@dataclass(frozen=True, slots=True)
class LionScalars:
    """Scalars of one Lion step."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    lr: float
    decay: float

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> LionScalars:
        """From a param group; the same at every step."""
        (beta1, beta2), lr = (float(b) for b in group["betas"]), float(group["lr"])
        return cls(
            fp32(beta1),
            fp32(1 - beta1),
            fp32(beta2),
            fp32(1 - beta2),
            fp32(lr),
            fp32(lr * float(group["weight_decay"])),
        )


@dataclass(frozen=True, slots=True)
class MuonScalars:
    """Scalars of Muon's passes over elements.

    Attributes:
        average, ahead: what the difference of gradient and momentum is multiplied with, for the new
            momentum, and for what is one step ahead of it.
        decay: learning rate times weight decay.
        average_from_end, ahead_from_end: whether the product is added to the second of the two that
            the difference is of: gradient, or new momentum. So does ``torch.lerp`` with weights
            from 0.5 on.
    """

    average: float
    ahead: float
    decay: float
    average_from_end: bool
    ahead_from_end: bool
    nesterov: bool

    @classmethod
    def at(cls, group: Mapping[str, Any]) -> MuonScalars:
        """From a param group; the same at every step."""
        momentum = float(group["momentum"])
        average, average_from_end = _lerp(1 - momentum)
        ahead, ahead_from_end = _lerp(momentum)
        decay = fp32(float(group["lr"]) * float(group["weight_decay"]))
        return cls(
            average, ahead, decay, average_from_end, ahead_from_end, group["nesterov"]
        )


def _lerp(weight: float) -> tuple[float, bool]:
    from_end = weight >= 0.5
    return fp32(fp32(weight) - 1.0) if from_end else fp32(weight), from_end


SCALARS: dict[str, Any] = {
    "adam": AdamScalars,
    "lamb": LambScalars,
    "stable_adamw": StableScalars,
    "sgd": SgdScalars,
    "lion": LionScalars,
}
"""What the method of a backend that carries out a rule takes, by rule."""


def _bias_corrections(
    group: Mapping[str, Any], beta1: float, beta2: float, step: int
) -> tuple[float, float]:
    return (
        (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
    )
