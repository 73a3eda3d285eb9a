"""LAMB, which scales a whole parameter's update: You et al. 2020, with apex's settings. Formulas:
docs/numerics.md."""

from __future__ import annotations

from mp_optim.core import SlotUpdate
from mp_optim.kernels import Backend
from mp_optim.kernels.kernel_args import LambScalars, fp32
from mp_optim.kernels.sums import reduce_rows
from mp_optim.rules.rule import Launch, Rule, Settings


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
