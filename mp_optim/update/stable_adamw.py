"""StableAdamW: AdamW with update clipping (Wortsman et al. 2023, Algorithm 2). Formulas:
docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from mp_optim.slots import Slot, SlotUpdate
from mp_optim.update.adam import AdamRule
from mp_optim.update.backends import Backend
from mp_optim.update.kernel_args import StableScalars
from mp_optim.update.optimizer import RuleOptimizer
from mp_optim.update.rule import Launch, Settings, Workspace, add_up_parts, parts_over


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
        **precision: fields of :class:`~mp_optim.update.state_format.StatePrecision`, such as
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
        rule = StableAdamWRule()
        settings = rule.settings_from(locals())
        super().__init__(rule, params, settings, backend, precision)
