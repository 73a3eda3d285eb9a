"""ChainedOptimizer: the dense and the expert part of a MoE as one optimizer.

The parts share one gradient norm, one verdict and one loss scale, so a step either happens for all
parameters or for none, and no part can drift to a scale of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from mp_optim.distributed.composite import CompositeOptimizer
from mp_optim.distributed.grad_reducer import GradReducer
from mp_optim.distributed.optimizer import DistributedOptimizer
from mp_optim.distributed.reduction_order import reduce_in_one_order
from mp_optim.precision import MegatronOptimizer
from mp_optim.slots import Slot, iter_slots


class ChainedOptimizer(CompositeOptimizer):
    """Several :class:`MegatronOptimizer` that step together.

    ``param_groups`` are the parts' own dicts, one after the other: a change here is a change there.

    Args:
        chained_optimizers: at least one, all built with equal configs. The first one's loss scaler
            becomes the scaler of all.

    Raises:
        ValueError: no parts, or parts whose configs differ.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        if not chained_optimizers:
            raise ValueError("chained_optimizers is empty; pass at least one optimizer")
        first = chained_optimizers[0]
        if any(part.config != first.config for part in chained_optimizers):
            raise ValueError(
                "the chained optimizers' configs differ; build all parts with one OptimizerConfig"
            )
        groups = [group for part in chained_optimizers for group in part.param_groups]
        super().__init__(groups, dict(first.defaults), first.config, first.grad_scaler)
        self.take_parts(chained_optimizers)
        self._reduce_in_one_order()

    def _reduce_in_one_order(self) -> None:
        """Let the parts' buckets be reduced in the same order on all ranks."""
        sharded = [
            part for part in self.parts if isinstance(part, DistributedOptimizer)
        ]
        reducers = [
            part.grad_reducer
            for part in sharded
            if isinstance(part.grad_reducer, GradReducer)
        ]
        if len(reducers) > 1:
            again = self.config.data_parallel_sharding_strategy == "optim_grads"
            reduce_in_one_order(reducers, again=again)

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        return self.parts

    def locate(self, slot: Slot) -> tuple[MegatronOptimizer, Slot]:
        index = slot.group
        for part in self.parts:
            if index < len(part.param_groups):
                return part, Slot(index, slot.position)
            index -= len(part.param_groups)
        raise IndexError(f"{slot} is not in the chain")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the last part of its kind (``is_expert_parallel`` or not).

        Raises:
            ValueError: a parameter is in some part already, naming it.
        """
        if not self.parts:  # torch's constructor is adding the parts' own groups
            self.param_groups.append(param_group)
            self.lists_are_known()
            return
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        _refuse_known(self, params)
        param_group = {**param_group, "params": params}
        expert = param_group.get("is_expert_parallel", False)
        alike = [part for part in self.parts if _is_expert(part) == expert]
        (alike or self.parts)[-1].add_param_group(param_group)
        self.param_groups[:] = [
            group for part in self.parts for group in part.param_groups
        ]
        self.lists_are_known()

    def check_lists(self) -> None:
        """Also give the parts groups that were put in the place of theirs here."""
        super().check_lists()
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups[:] = islice(groups, len(part.param_groups))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def _refuse_known(optimizer: ChainedOptimizer, params: Sequence[Any]) -> None:
    """Each part looks at its own groups alone."""
    added = {id(param[1] if isinstance(param, tuple) else param) for param in params}
    for slot, param in iter_slots(optimizer.param_groups):
        if id(param) in added:
            raise ValueError(
                f"add_param_group: {optimizer.slot_name(slot)} is in param group {slot.group} "
                "already; give a group only parameters that are in none"
            )


def _is_expert(part: MegatronOptimizer) -> bool:
    return any(group.get("is_expert_parallel", False) for group in part.param_groups)
