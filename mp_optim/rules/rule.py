"""Interface of update rules (moments, settings and the arithmetic of a step), and all rules except
Muon.

A rule has no state, so several optimizers may share a rule.
:class:`~mp_optim.rules.rule_executor.RuleExecutor` stores the moments that a rule names, and passes
the moments to the rule in a :class:`Launch`.
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
from mp_optim.core.tensor_layout import ShardRegion
from mp_optim.kernels import Backend
from mp_optim.kernels.kernel_args import RULE_SCALARS, LambScalars, TensorLists, fp32
from mp_optim.kernels.sums import reduce_rows

Settings = Mapping[str, Any]
"""A param group with the hyperparameters of a rule."""


class Launch(NamedTuple):
    """Parameters that a rule steps together, and all inputs of their step.

    The parameters have one device, group, step number and multiplier.

    Attributes:
        group: index of the param group.
        positions: position of each parameter in the group.
        settings: settings of the group.
        regions: for each parameter, the region of the parameter that this rank has.
        device: device of the step.
        step: number of this step, from 1 on.
        multiplier: factor of the gradients; on the device only if
            ``backend.takes_device_multipliers`` is True and :attr:`Rule.needs_numbers` is False.
        updates: slots, gradients and sharding of the parameters.
        mains: tensors that are stepped; ``lists`` has copies of the tensors that are not
            contiguous.
        outputs: tensors that are written; ``lists`` has copies of the tensors that are not
            contiguous.
        lists: tensor lists for a backend.
        workspace: the result of :meth:`Rule.new_workspace`.
        rule: rule that steps the group.
        firsts: for a launch over a window, the index of each tensor's first element in the rank's
            shard of the parameter. Empty if each tensor is the whole shard.
        begin_audit: function to call with a backend's arguments before the backend steps elements.
            The result is None, or a function to call after the step. None without an audit.
        queue: list to which a rule may append a kernel, in place of calling it; None if the rule
            must call the kernel.
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
    workspace: Any
    rule: Rule
    firsts: Sequence[int] = ()
    begin_audit: Callable[..., Callable[[], None] | None] | None = None
    queue: list[Callable[[], None]] | None = None

    @property
    def factor(self) -> float | Tensor:
        """The multiplier as an argument of a backend."""
        multiplier = self.multiplier
        return multiplier.values if isinstance(multiplier, DeviceMultiplier) else multiplier

    @property
    def open_queue(self) -> list[Callable[[], None]] | None:
        """:attr:`queue`; None if an audit or copies of strided tensors read the kernel's results at
        once."""
        in_place = self.lists.main is self.mains and self.lists.output is self.outputs
        return self.queue if in_place and self.begin_audit is None else None

    def copy_back(self) -> None:
        """Copy new values from the contiguous copies in ``lists`` to tensors that are not
        contiguous."""
        for tensors, stepped in ((self.mains, self.lists.main), (self.outputs, self.lists.output)):
            if tensors is stepped:
                continue
            for tensor, copy in zip(tensors, stepped, strict=True):
                if tensor is not None and copy is not None and tensor is not copy:
                    tensor.copy_(copy)


class Rule(ABC):
    """The arithmetic of a step, without state.

    Attributes:
        name: name of the rule's row in :data:`mp_optim.config.rules.RULES`, which names the
            moments.
        kernels: name of the rule for which a backend must have kernels.
        clips: True if the rule clips gradients (:meth:`effective_multiplier`).
        has_one_pass: True if :meth:`apply` passes ``TensorLists.follows`` and
            ``TensorLists.changed`` to one kernel, which supports both.
        needs_numbers: True if :meth:`apply` computes with the multiplier on the host.
        reads_steps: True if a step needs the number of earlier steps of a slot; False if a step
            needs only whether the slot was stepped before.
        deciding_setting: name of the setting on which :meth:`moments` depends; empty if the moments
            depend on no setting.
        group_settings: settings of every group that are not hyperparameters, with their defaults.
    """

    name = "custom"
    clips = False
    has_one_pass = False
    needs_numbers = True
    reads_steps = True
    deciding_setting = ""
    group_settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def kernels(self) -> str:
        return self.name

    def of(self, group: Settings) -> Rule:
        """Return the rule that steps a group: this rule, or another rule that a setting of the
        group chooses."""
        return self

    # -- state ------------------------------------------------------------------------------------

    def moments(self, group: Settings) -> tuple[str, ...]:
        """Return the names of the moments that are stored with a group's settings."""
        return RULES[self.name].moment_names

    def new_workspace(self) -> Any:
        """Return an object with the counters of an optimizer, which the executor passes to every
        launch.

        The object has a method ``metrics()`` and is not saved. None for a rule without counters.
        """
        return None

    # -- checks -----------------------------------------------------------------------------------

    def check_settings(self, group: Settings) -> None:
        """Raise ValueError if a setting is out of range; the message has its name and value."""
        RULES[self.name].check(group)

    def check_shapes(self, group: Settings, shapes: Iterable[torch.Size]) -> None:  # noqa: B027
        """Check the shapes of a group's parameters.

        Args:
            group: the param group.
            shapes: shapes of the whole parameters, also if this rank has shards.

        Raises:
            ValueError: a shape is not supported. The message names the parameter.
        """

    # -- steps ------------------------------------------------------------------------------------

    def is_elementwise(self, group: Settings) -> bool:
        """True if, with a group's settings, each element is stepped independently of other
        elements.

        Windows may then step a part of a parameter.
        """
        return self.name in RULES and RULES[self.name].reads == "elements"

    def is_collective(self, group: Settings, update: SlotUpdate) -> bool:
        """True if all ranks with shards of a slot must step the slot together.

        Such slots are stepped in the same order on all of these ranks.
        """
        return False

    def effective_multiplier(self, group: Settings, multiplier: float, grad_norm: float) -> float:
        """Return the multiplier after the rule's clipping; the given multiplier if the rule does
        not clip.

        Args:
            group: settings of the group.
            multiplier: factor of the gradients before clipping.
            grad_norm: global L2 norm of the gradients after their multipliers.
        """
        return multiplier

    def backend_and_reason(self, backend: Backend, why: str, group: Settings) -> tuple[str, str]:
        """Return the name of the backend that steps a group, and the reason for this backend."""
        return backend.name, why

    @abstractmethod
    def apply(self, launch: Launch, backend: Backend) -> None:
        """Step the parameters of a launch.

        A rule with kernels calls a method of the backend. A rule without kernels computes the step
        in torch operations on FP32 values, with the functions of :mod:`mp_optim.kernels.chunking`.
        """


class ElementRule(Rule):
    """Rule that steps each element independently (:mod:`~mp_optim.kernels.element_rules`), for
    which backends have kernels."""

    has_one_pass = True
    needs_numbers = False

    def apply(self, launch: Launch, backend: Backend) -> None:
        scalars = RULE_SCALARS[self.name].at(launch.settings, launch.step)
        given = self.name, launch.lists, scalars, launch.factor
        if launch.queue is not None and (queue := launch.open_queue) is not None:
            kernel = backend.prepared(*given)
            if kernel is not None:
                queue.append(kernel)
                return
        written = launch.begin_audit(*given) if launch.begin_audit is not None else None
        backend.step(*given)
        if written is not None:
            written()


# -- the rules ------------------------------------------------------------------------------------
#
# The formulas are in docs/numerics.md. Adam and AdamW are by Kingma & Ba (2015) and by Loshchilov &
# Hutter (2019). Lion steps by the sign of an interpolated momentum (Chen et al. 2023). SGD has
# torch's momentum. LAMB scales the update of a whole parameter (You et al. 2020).


def check_decoupled(group: Settings) -> None:
    """Raise ValueError if cautious weight decay is combined with decay that is added to the
    gradient."""
    if group.get("cautious_wd") and not group.get("adam_w_mode", True):
        raise ValueError(
            "cautious_wd=True: needs decoupled weight decay; set adam_w_mode=True "
            "(decoupled_weight_decay=True of the config)"
        )


class AdamRule(ElementRule):
    """Adam and AdamW."""

    name = "adam"

    def check_settings(self, group: Settings) -> None:
        super().check_settings(group)
        check_decoupled(group)


class LionRule(ElementRule):
    """Lion, with decoupled weight decay."""

    name = "lion"
    reads_steps = False


class SgdRule(ElementRule):
    """SGD with momentum. The momentum buffer starts as the first gradient."""

    name = "sgd"
    reads_steps = False
    deciding_setting = "momentum"

    def moments(self, group: Settings) -> tuple[str, ...]:
        return super().moments(group) if group["momentum"] else ()

    def check_settings(self, group: Settings) -> None:
        super().check_settings(group)
        if group["nesterov"] and not (group["momentum"] > 0 and group["dampening"] == 0):
            raise ValueError(
                f"nesterov={group['nesterov']!r}: needs momentum > 0 and dampening=0, but "
                f"momentum={group['momentum']!r} and dampening={group['dampening']!r}; set "
                "nesterov=False, or change momentum and dampening"
            )


class LambRule(Rule):
    """LAMB with apex's settings.

    A parameter has one trust ratio, computed on the device that steps the parameter, so no gradient
    or main param is copied between devices. The ranks that share a parameter reduce one small
    tensor of sums.
    """

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
        shard_groups = launch.updates.slots.shard_groups
        if any(shard_groups):
            sums = backend.lamb_moments(lists, scalars, multiplier)
            reduce_rows(sums, shard_groups, "adding up LAMB's norms")
            backend.lamb_finish(lists, scalars, sums, multiplier)
        else:
            backend.lamb(lists, scalars, multiplier)


NAMED_RULES: dict[str, Rule] = {
    rule.name: rule for rule in (AdamRule(), LambRule(), LionRule(), SgdRule())
}
"""The rules of this module, by name."""
