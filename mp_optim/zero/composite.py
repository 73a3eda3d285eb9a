"""Several optimizers that step as one optimizer. A call about one slot goes to the member that has
the slot; a call about all slots goes to all members.

:class:`ChainedOptimizer` joins the dense and the expert optimizer of a mixture-of-experts model.
The members share one gradient norm, one verdict and one loss scale. So all parameters are stepped
or no parameter is stepped, and the loss scales of the members stay equal.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import Slot, iter_slots
from mp_optim.core.interrupted_step import StepMark
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.mixed_precision.description import Description, DescriptionRow
from mp_optim.mixed_precision.main_params import MainParams
from mp_optim.mixed_precision.step import GradsOfMembers
from mp_optim.zero.grad_reducer import GradReducer, reduce_in_one_order
from mp_optim.zero.transport import Reducer

_SUMMED = (
    "bytes_|muon_flops$|update_clipped_params$|reloaded_params$|.*_ms$|"
    "speculation_(hits|redone)$|stale_buckets$"
)
"""Metrics that are added up over the members. For all other metrics the first member's value is
returned."""


class CompositeOptimizer(MegatronOptimizer):
    """Members that step together, with one measurement, one verdict and one loss scale.

    A subclass implements :meth:`locate`, and calls :meth:`take_members` in its constructor.

    Attributes:
        members: the members in slot order.
        grad_reducer: the reducer of gradients; None if this optimizer does not shard gradients.
    """

    grads_of: ClassVar[type[Any]] = GradsOfMembers
    grad_reducer: Reducer | None = None

    def _begin(self, config: OptimizerConfig) -> None:
        super()._begin(config)
        self.members: list[MegatronOptimizer] = []

    def take_members(self, members: Sequence[MegatronOptimizer]) -> None:
        """Set the members. Each member gets this optimizer's loss scale, counts, observers and
        consistency flag.

        Args:
            members: the members in slot order.
        """
        self.members.extend(members)
        for member in self.members:
            member.join(self)
            self.backward_schedulers += member.backward_schedulers
        self.use_mark(self.step_mark)

    @abstractmethod
    def locate(self, slot: Slot) -> tuple[MegatronOptimizer, Slot]:
        """Return the member that has a slot, and the slot in that member's groups."""

    def leaf(self, slot: Slot) -> tuple[MainParams, Slot]:
        member, member_slot = self.locate(slot)
        return member.leaf(member_slot)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer of the only member.

        Raises:
            AttributeError: there are several members; use ``chained_optimizers``.
        """
        if len(self.members) == 1:
            return self.members[0].optimizer
        raise AttributeError(
            "a chain of several optimizers has no single inner optimizer; use .chained_optimizers"
        )

    # -- calls about one slot, some slots or all --------------------------------------------------

    def make_current(self, slot: Slot | None = None, *, follow_only: bool = False) -> None:
        for member, member_slot in self._located(slot):
            member.make_current(member_slot, follow_only=follow_only)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        located = [self.locate(slot) for slot in slots]
        for member in self.members:
            member.allocate_state(
                [member_slot for owner, member_slot in located if owner is member]
            )

    # -- calls to all members ---------------------------------------------------------------------

    def all_mains(self) -> list[MainParams]:
        return [mains for member in self.members for mains in member.all_mains()]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for member in self.members:
            yield from member.named_gradients()

    def check_settings(self, group: dict[str, Any]) -> None:
        # All members have the same rule, so one member's check is enough.
        self.members[0].check_settings(group)

    def share_settings(self) -> None:
        for member in self.members:
            # The groups of this optimizer are the members' groups, so only the members exchange
            # settings.
            member.share_settings()

    def use_mark(self, mark: StepMark) -> None:
        self.step_mark = mark
        for member in self.members:
            member.use_mark(mark)

    def join(self, whole: MegatronOptimizer) -> None:
        super().join(whole)
        for member in self.members:
            member.join(whole)

    def recover(self) -> None:
        for member in self.members:
            member.recover()

    def sharers(self) -> Iterator[tuple[str, tuple[ProcessGroup, ...]]]:
        for member in self.members:
            yield from member.sharers()

    def show_written_params(self) -> None:
        for member in self.members:
            member.show_written_params()

    def take_model_params(self, values: Mapping[str, Any]) -> None:
        for member in self.members:
            member.take_model_params(values)

    def memory_moved(self, slot: Slot | None = None) -> None:
        for member, member_slot in self._located(slot):
            member.memory_moved(member_slot)

    # -- communication ----------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context that enters the ``no_sync()`` of all members."""
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.no_sync())
            yield

    def finish_grad_sync(self) -> None:
        for member in self.members:
            member.finish_grad_sync()

    def finish_param_sync(self) -> None:
        for member in self.members:
            member.finish_param_sync()

    # -- main params and metrics -------------------------------------------------------------------

    def describe(self) -> Description:
        """Return the descriptions of all members as one. Groups have the indices of this
        optimizer."""
        rows: list[DescriptionRow] = []
        notes: list[str] = []
        first_group = 0
        for member in self.members:
            described = member.describe()
            rows += [replace(row, group=row.group + first_group) for row in described.rows]
            notes += described.notes
            first_group += len(member.param_groups)
        return Description(tuple(rows), tuple(notes))

    def own_metrics(self) -> dict[str, float]:
        """Return the first member's metrics. Bytes, times and counts are added up over all
        members."""
        metrics = [member.own_metrics() for member in self.members]
        names = dict.fromkeys(name for of_member in metrics for name in of_member)
        added = [name for name in names if re.match(_SUMMED, name)]
        totals: dict[str, float] = dict.fromkeys(added, 0)
        for name in added:
            totals[name] = sum(of_member.get(name, 0) for of_member in metrics)
        return {**metrics[0], **totals}

    def _located(self, slot: Slot | None) -> Sequence[tuple[MegatronOptimizer, Slot | None]]:
        """Return the member that has a slot, with the slot in that member's groups. For None,
        return all members."""
        return [(member, None) for member in self.members] if slot is None else [self.locate(slot)]


class ChainedOptimizer(CompositeOptimizer):
    """Several :class:`MegatronOptimizer` that step together.

    ``param_groups`` contains the param groups of all members, one member after the other. The dicts
    are the members' own, so a change of a setting here changes the member.

    Args:
        chained_optimizers: the members, at least one, all built with equal configs. The loss scaler
            of the first member becomes the scaler of all members.

    Raises:
        ValueError: there are no members, or the configs of members differ.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        if not chained_optimizers:
            raise ValueError("chained_optimizers is empty; pass at least one optimizer")
        first = chained_optimizers[0]
        if any(member.config != first.config for member in chained_optimizers):
            raise ValueError(
                "the chained optimizers' configs differ; build all of the optimizers with one "
                "OptimizerConfig"
            )
        groups = [group for member in chained_optimizers for group in member.param_groups]
        super().__init__(groups, dict(first.defaults), first.config, first.grad_scaler)
        self.take_members(chained_optimizers)
        composites = [member for member in self.members if isinstance(member, CompositeOptimizer)]
        reducers = [member.grad_reducer for member in composites]
        ours = [reducer for reducer in reducers if isinstance(reducer, GradReducer)]
        if len(ours) > 1:  # Otherwise ranks could pair collectives of different buckets.
            again = self.config.data_parallel_sharding_strategy == "optim_grads"
            reduce_in_one_order(ours, again=again)

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        return self.members

    def locate(self, slot: Slot) -> tuple[MegatronOptimizer, Slot]:
        index = slot.group
        for member in self.members:
            if index < len(member.param_groups):
                return member, Slot(index, slot.position)
            index -= len(member.param_groups)
        raise IndexError(
            f"slot={slot}: the chain has {len(self.param_groups)} param groups and no such group; "
            "use a slot from optimizer.slots()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to a member of the same kind, expert or dense (``is_expert_parallel``).
        If several members fit, the last of these members gets the group.

        Args:
            param_group: ``params``, and hyperparameters that differ from the defaults.

        Raises:
            ValueError: a parameter is already in a member; the message has the parameter's name.
        """
        if not self.members:  # torch's constructor adds the members' own groups.
            self.param_groups.append(param_group)
            self.lists_are_known()
            return
        self.check_lists()
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        added = {id(param[1] if isinstance(param, tuple) else param) for param in params}
        # Check all groups here, because a member checks only its own groups.
        for slot, param in iter_slots(self.param_groups):
            if id(param) in added:
                raise ValueError(
                    f"add_param_group: {self.slot_name(slot)} is in param group {slot.group} "
                    "already; remove this parameter from the new group"
                )
        kind = bool(param_group.get("is_expert_parallel", False))
        alike = []
        for member in self.members:
            kinds = [group.get("is_expert_parallel", False) for group in member.param_groups]
            if any(kinds) == kind:
                alike.append(member)
        (alike or self.members)[-1].add_param_group({**param_group, "params": params})
        self.param_groups[:] = [group for member in self.members for group in member.param_groups]
        self.lists_are_known()

    def check_lists(self) -> None:
        """Raise ValueError if lists were edited. Copy groups that a caller put into
        ``param_groups`` to the members."""
        super().check_lists()
        groups = iter(self.param_groups)
        for member in self.members:
            member.param_groups[:] = islice(groups, len(member.param_groups))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)
