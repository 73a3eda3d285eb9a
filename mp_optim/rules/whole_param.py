"""The rules that scale a whole parameter's update. Formulas: docs/numerics.md.

- StableAdamW: AdamW with update clipping, Wortsman et al. 2023, Algorithm 2
- LAMB: You et al. 2020, with apex's settings
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from mp_optim.core import Slot, SlotUpdate
from mp_optim.kernels import Backend
from mp_optim.kernels.kernel_args import LambScalars, StableScalars, fp32
from mp_optim.kernels.sums import reduce_rows
from mp_optim.rules.elementwise import AdamRule
from mp_optim.rules.rule import Launch, Rule, Settings, Workspace, add_up_parts, parts_over
from mp_optim.rules.rule_optimizer import RuleOptimizer


class ClippedParams(Workspace):
    """Which parameters the last step clipped."""

    def __init__(self) -> None:
        self._clipped: dict[Slot, tuple[Sequence[bool] | Tensor, int]] = {}

    def metrics(self) -> dict[str, float]:
        """Of how many parameters the last step was clipped; waits for steps on a device."""
        flags = {
            id(found): found.tolist() if isinstance(found, Tensor) else found
            for found, _ in self._clipped.values()
        }
        clipped = sum(flags[id(found)][at] for found, at in self._clipped.values())
        return {"update_clipped_params": clipped}

    def note(
        self, slots: Sequence[Slot], clipped: Sequence[bool] | Tensor, multiplier: float | Tensor
    ) -> None:
        """A launch has clipped these of its parameters."""
        if isinstance(clipped, Tensor):
            clipped = self._placed(clipped, slots[0], multiplier)
        pairs = zip(repeat(clipped), range(len(slots)), strict=False)
        self._clipped.update(zip(slots, pairs, strict=True))

    def _placed(self, clipped: Tensor, first: Slot, multiplier: float | Tensor) -> Tensor:
        """What the device says is clipped, in memory that stays, as a CUDA graph writes it again;
        of a step that is skipped, what was there before."""
        place, at = self._clipped.get(first, (None, 0))
        fits = isinstance(place, Tensor) and place.shape == clipped.shape and at == 0
        if not isinstance(place, Tensor) or not fits:
            place = torch.zeros_like(clipped)
        if isinstance(multiplier, Tensor) and multiplier.numel() == 2:
            clipped = torch.where(multiplier[1:] != 0.0, place, clipped)
        return place.copy_(clipped)


class StableAdamWRule(AdamRule):
    """AdamW. A parameter whose gradients are larger than its second moment knows, as a root mean
    square over all of it, steps by so much less."""

    name = "stable_adamw"
    hands_weights = False

    def new_workspace(self) -> Workspace:
        return ClippedParams()

    def is_collective(self, group: Settings, update: SlotUpdate) -> bool:
        return bool(parts_over(update.shard_groups, update.layout))

    def apply(self, launch: Launch, backend: Backend) -> None:
        lists, updates, multiplier = launch.lists, launch.updates, launch.factor
        scalars = StableScalars.at(launch.settings, launch.step)
        sums = backend.stable_adamw_sums(lists, scalars, multiplier)
        sizes = add_up_parts(sums, updates, launch.regions, "adding up StableAdamW's sums")
        clipped = backend.stable_adamw_finish(lists, scalars, sums, sizes, multiplier)
        assert isinstance(launch.workspace, ClippedParams)
        if clipped is not None:
            launch.workspace.note(updates.slots, clipped, multiplier)


class FusedStableAdamW(RuleOptimizer):
    """AdamW over FP32 tensors, wherever they lie and however they are split. A parameter whose
    gradients are larger than its second moment knows, as a root mean square over all of it, steps
    by so much less.

    Args:
        eps: added to the denominator of the step, and the floor of that of the clipping.
        cautious_wd: see ``OptimizerConfig.cautious_wd``.
        **precision: fields of :class:`~mp_optim.kernels.state_format.StatePrecision`, such as
            ``exp_avg_dtype``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        cautious_wd: bool = False,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "bias_correction": bias_correction,
            "cautious_wd": cautious_wd,
        }
        super().__init__(StableAdamWRule(), params, settings, backend, precision)


class LambRule(Rule):
    """LAMB. The trust ratio is per parameter: nothing crosses devices, and for a sharded parameter
    one small tensor of sums is reduced."""

    name = "lamb"
    clips = True
    needs_numbers = False

    def is_collective(self, group: Settings, update: SlotUpdate) -> bool:
        return bool(update.shard_groups)

    def effective_multiplier(self, group: Settings, multiplier: float, grad_norm: float) -> float:
        limit = group["max_grad_norm"]
        if not limit or grad_norm <= limit:
            return multiplier
        return fp32(multiplier * limit / grad_norm)

    def apply(self, launch: Launch, backend: Backend) -> None:
        lists, multiplier = launch.lists, launch.factor
        scalars = LambScalars.at(launch.settings, launch.step)
        shard_groups = launch.updates.shard_groups
        if any(shard_groups):
            sums = backend.lamb_moments(lists, scalars, multiplier)
            reduce_rows(sums, shard_groups, "adding up LAMB's norms")
            backend.lamb_finish(lists, scalars, sums, multiplier)
        else:
            backend.lamb(lists, scalars, multiplier)


class FusedLAMB(RuleOptimizer):
    """LAMB over FP32 tensors, wherever they lie and however they are split.

    The trust ratio is per parameter: nothing crosses devices, and for a sharded parameter one small
    tensor of sums is reduced. The gradient norm for ``max_grad_norm`` is global: callers of
    ``step_slots`` pass it in, ``step`` computes it over all devices.

    Args:
        grad_averaging: weigh the gradient with ``1 - beta1`` in the first moment.
        max_grad_norm: clip the global gradient norm to this; 0 turns clipping off.
        use_nvlamb: adapt the learning rate also where ``weight_decay`` is 0.
        **precision: fields of :class:`~mp_optim.kernels.state_format.StatePrecision`, such as
            ``exp_avg_dtype``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
            "grad_averaging": grad_averaging,
        }
        super().__init__(LambRule(), params, settings, backend, precision)
