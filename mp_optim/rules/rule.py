"""What a rule is: the moments it keeps, the settings it takes, and its step, without any state.

Whoever steps (:class:`~mp_optim.rules.rule_executor.RuleExecutor`) asks the rule what to keep for a
parameter, keeps it, and hands it back in a :class:`Launch`. A rule may be shared by optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.core import CachedTensorList, DeviceMultiplier, Multiplier, SlotUpdate, SlotUpdates
from mp_optim.core.tensor_layout import ParamLayout, ShardRegion
from mp_optim.kernels import Backend
from mp_optim.kernels.element_rules import RULE_SCALARS
from mp_optim.kernels.kernel_args import TensorLists
from mp_optim.kernels.sums import Groups, reduce_rows

Settings = Mapping[str, Any]
"""A param group, of which rules read hyperparameters."""
CAUTION_REDUCTION = "counting the elements that cautious updates keep"
"""The name of this reduction in errors about ranks."""


class Workspace:
    """Counts of a rule, kept by each optimizer from one launch to the next. They are not saved."""

    def metrics(self) -> dict[str, float]:
        """Numbers about the last step, by names as of ``optimizer.metrics()``."""
        return {}


class Launch(NamedTuple):
    """Parameters that a rule steps at once, with all that the result depends on: they share device,
    group, step and multiplier.

    Attributes:
        group, positions: the slots. settings: of their group.
        regions: which elements of each parameter are here.
        device: where they are stepped.
        step: which step of these parameters it is, from 1 on.
        multiplier: of the gradients; one that the device has only if
            ``backend.takes_device_multipliers`` and not :attr:`Rule.needs_numbers`.
        updates: who the parameters are, and how they are split.
        mains, outputs: what is stepped and written; ``lists`` holds copies of those that are not
            contiguous.
        lists: what a backend is handed.
        workspace: the rule's own (:meth:`Rule.new_workspace`).
        firsts: where each tensor begins in what the rank has of its parameter; empty if all of them
            are all of it.
        begin_audit: called before a backend steps elements, with what it is given; what that
            returns, if anything, is called afterwards. None: nothing is audited.
    """

    group: int
    positions: list[int]
    settings: Settings
    regions: Sequence[ShardRegion]
    device: torch.device
    step: int
    multiplier: Multiplier
    updates: SlotUpdates
    mains: CachedTensorList
    outputs: Sequence[Tensor | None]
    lists: TensorLists
    workspace: Workspace
    firsts: Sequence[int] = ()
    begin_audit: Callable[..., Callable[[], None] | None] | None = None

    @property
    def factor(self) -> float | Tensor:
        """The multiplier as a backend takes it."""
        multiplier = self.multiplier
        return multiplier.values if isinstance(multiplier, DeviceMultiplier) else multiplier

    def copy_back(self) -> None:
        """Give what is not contiguous the values of the copies that were stepped."""
        for tensors, stepped in ((self.mains, self.lists.main), (self.outputs, self.lists.output)):
            if tensors is stepped:
                continue
            for tensor, copy in zip(tensors, stepped, strict=True):
                if tensor is not None and copy is not None and tensor is not copy:
                    tensor.copy_(copy)


def parts_over(shard_groups: Groups, layout: ParamLayout | None) -> Groups:
    """The groups of ranks that have the other parts of a parameter, those of tensor parallelism
    among them."""
    if layout is None or layout.tensor_parallel is None:
        return shard_groups
    return (*shard_groups, layout.tensor_parallel)


def add_up_parts(
    sums: Tensor, updates: SlotUpdates, regions: Sequence[ShardRegion], doing: str
) -> list[int]:
    """Add up sums, a row for each parameter, in place over the ranks that have parts of it; returns
    the elements of whole parameters.

    Args:
        updates, regions: of a launch.
        doing: what to say of it if a rank is missing.
    """
    layouts = updates.layouts or [None] * len(updates)
    reduce_rows(sums, list(map(parts_over, updates.shard_groups, layouts)), doing)
    sizes = [region.shape.numel() for region in regions]
    for index, layout in enumerate(layouts):
        if layout is not None and layout.tensor_parallel is not None:  # it cuts equal parts
            sizes[index] *= layout.tensor_parallel.size()
    return sizes


class Rule(ABC):
    """How parameters are stepped.

    Attributes:
        name: of its row in :data:`mp_optim.config.rules.RULES`, which names its moments.
        kernels: the rule that backends are asked for kernels of.
        clips: whether it clips gradients itself (:meth:`effective_multiplier`).
        hands_weights: whether :meth:`apply` hands on ``TensorLists.follows`` to a backend that has
            ``follows_weights``.
        marks_changes: whether :meth:`apply` hands on ``TensorLists.changed`` to a backend that has
            ``marks_changes``.
        needs_numbers: whether :meth:`apply` works with the multiplier itself, rather than hand it
            to a backend.
        group_settings: settings of every group that are no hyperparameters, with their defaults.
    """

    name = "custom"
    clips = False
    marks_changes = False
    hands_weights = False
    needs_numbers = True
    group_settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def kernels(self) -> str:
        return self.name

    def of(self, group: Settings) -> Rule:
        """Return the rule that steps a group: this one, or another that a setting chooses."""
        return self

    # -- what it keeps ----------------------------------------------------------------------------

    def moments(self, group: Settings) -> tuple[str, ...]:
        """Names of the moments that are kept under a group's settings."""
        return RULES[self.name].moment_names

    def deciding_setting(self, group: Settings) -> str:
        """The setting that :meth:`moments` reads, if there is one."""
        return ""

    def unread_moments(self, group: Settings) -> tuple[str, ...]:
        """Names of moments that the rule does without under a group's settings, though its formula
        has them. Where a slot has one from before, it is stepped on, so that other settings find
        it."""
        return ()

    def reads_steps(self, group: Settings) -> bool:
        """Whether the formula needs to know how often a slot was stepped, beyond whether it was."""
        return True

    def new_workspace(self) -> Workspace:
        """What an optimizer hands to every launch."""
        return Workspace()

    # -- what it takes ----------------------------------------------------------------------------

    def check_settings(self, group: Settings) -> None:
        """Raise ValueError naming the setting and its value if it is out of range."""
        RULES[self.name].check(group)

    def check_shapes(self, group: Settings, shapes: Iterable[torch.Size]) -> None:  # noqa: B027
        """Raise ValueError naming a parameter of a group that has a shape which cannot be stepped.

        Args:
            shapes: of the whole parameters, of which parts may be here.
        """

    # -- what a step is ---------------------------------------------------------------------------

    def is_elementwise(self, group: Settings) -> bool:
        """Whether elements are stepped by themselves under a group's settings, so that a part of a
        parameter can be."""
        in_elements = self.name in RULES and RULES[self.name].reads == "elements"
        return in_elements and not group.get("caution")  # which counts elements of all of it

    def is_collective(self, group: Settings, update: SlotUpdate) -> bool:
        """Whether stepping a slot is a collective of the ranks that hold its parts, so that all
        have to do it in one order."""
        return False

    def effective_multiplier(self, group: Settings, multiplier: float, grad_norm: float) -> float:
        """The multiplier after the rule's own clipping, if it has one."""
        return multiplier

    def backend_and_reason(self, backend: Backend, why: str, group: Settings) -> tuple[str, str]:
        """Name of what steps a group where a backend was chosen, and why."""
        return backend.name, why

    def announce(  # noqa: B027
        self,
        settings: Settings,
        step: int,
        lists: TensorLists,
        backend: Backend,
        device: torch.device,
    ) -> None:
        """Let a backend have the numbers of a step on a device before what is stepped is there.
        Rules whose parameters are stepped in parts do."""

    @abstractmethod
    def apply(self, launch: Launch, backend: Backend) -> None:
        """Carry the rule out.

        A rule with kernels calls its backend's method. One without does it all here: multiplies the
        gradients, reads moments and main params in FP32 and stores the new ones (
        :mod:`mp_optim.kernels.chunking`), which also writes remainders and outputs.
        """


class ElementRule(Rule):
    """A rule of :mod:`~mp_optim.kernels.element_rules`, which backends have kernels for."""

    marks_changes = True
    hands_weights = True
    needs_numbers = False

    def is_collective(self, group: Settings, update: SlotUpdate) -> bool:
        return bool(group.get("caution") and parts_over(update.shard_groups, update.layout))

    def announce(
        self,
        settings: Settings,
        step: int,
        lists: TensorLists,
        backend: Backend,
        device: torch.device,
    ) -> None:
        backend.announce(lists, RULE_SCALARS[self.name].at(settings, step), device)

    def apply(self, launch: Launch, backend: Backend) -> None:
        lists, multiplier = launch.lists, launch.factor
        scalars = RULE_SCALARS[self.name].at(launch.settings, launch.step)
        scales = None
        if launch.settings.get("caution"):
            counts = backend.agreements(self.name, lists, scalars, multiplier)
            sizes = add_up_parts(counts, launch.updates, launch.regions, CAUTION_REDUCTION)
            scales = backend.caution_scales(counts, sizes)
        given = self.name, lists, scalars, multiplier, scales
        written = launch.begin_audit(*given) if launch.begin_audit is not None else None
        backend.step(*given)
        if written is not None:
            written()
