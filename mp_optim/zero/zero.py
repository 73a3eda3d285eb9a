"""DistributedOptimizer: data-parallel ranks shard main params, state and (ZeRO-2) gradients.

The model's parameters are views of flat buckets. This rank's part of each parameter is a plain
tensor. A precision wrapper has these tensors in the same groups and positions. The wrapper measures
gradient norms, decides about clipping and skips, and steps. This module reduces gradients before
the wrapper's step, and gathers the parameters after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import ParamGroups, Slot, group_settings, iter_slots, slot_name, with_names
from mp_optim.core.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.core.param_attributes import (
    main_param_of,
    norm_attributes,
    set_main_param,
    shown_mains_of,
)
from mp_optim.core.slot_state import MASTER
from mp_optim.host.calls import in_own_modes
from mp_optim.mixed_precision import MegatronGradScaler, MegatronOptimizer
from mp_optim.mixed_precision.grad_norm import Measurement, NormKey
from mp_optim.mixed_precision.settings_agreement import of_config, of_groups
from mp_optim.mixed_precision.step import AnyVerdict, Engine, GradsOfMembers
from mp_optim.mixed_precision.wrapped_optimizer import WrappedOptimizer
from mp_optim.process_groups.agreement import check_agreement
from mp_optim.process_groups.missing_ranks import naming_missing_ranks
from mp_optim.process_groups.process_groups import ProcessGroups
from mp_optim.zero.composite import CompositeOptimizer
from mp_optim.zero.sharded_params import ShardedParams, in_forward_order
from mp_optim.zero.transport import Reducer

Build = Callable[[list[dict[str, Any]]], WrappedOptimizer]

_OURS = "an optimizer"
"""The word for the compared object in errors about ranks that disagree."""


class ReducedGrads(GradsOfMembers):
    """The reduced gradients of this rank's shards. The constructor reduces the gradients.

    The reduction of the norm also compares the settings of the ranks.

    Args:
        optimizer: the :class:`DistributedOptimizer`.
    """

    def __init__(self, optimizer: Any) -> None:
        optimizer.finish_grad_sync()
        self._optimizer, self._model = optimizer, optimizer._model
        self._trained: list[Slot] = self._model.hand_out_grads()
        step, reducer = optimizer.counts.steps + 1, optimizer.grad_reducer
        names = (slot_name(optimizer.param_groups, slot) for slot in self._model.frozen)
        # Ranks compare these lines in the reduction of the norm, in addition to settings.
        optimizer.shards.engine.compared = [
            f"step {step}",
            *(f"{name} was frozen since the optimizer was built" for name in names),
            f"gradients of {reducer.rounds} backward passes reduced since zero_grad()",
        ]
        optimizer.share_settings()
        super().__init__(optimizer)
        # Every trained slot has a gradient here, which is zero if this rank ran no backward. Only
        # the reducer knows whether backward produced a gradient.
        self.has_any = reducer.has_gradients

    def sums(self, on_host: bool = False) -> Measurement:
        if not self._model.steps_everything:
            return super().sums()
        # Each rank steps all elements. Measure only the elements that this rank would own with
        # sharding, so that the norm is the sum of the same terms as with sharding.
        optimizer = self._optimizer
        over = (optimizer._group,)
        keys = {slot: NormKey(optimizer.norm_key(slot).group, over) for slot in optimizer.slots()}
        nothing = torch.empty(0, dtype=torch.float32, device=optimizer.device)
        owned = [self._model.owned_grad(slot) for slot in self._trained]
        grads = [nothing if grad is None else grad for grad in owned]
        distinct = list(dict.fromkeys(keys.values()))
        where = {slot: index for index, slot in enumerate(keys)}
        indices = [where[slot] for slot in self._trained]
        of_grads = [keys[slot] for slot in self._trained]
        engine: Engine = optimizer.shards.engine
        return engine.agreed_sums(grads, of_grads, indices, all_keys=distinct, over=over)

    def run(self, verdict: AnyVerdict) -> None:
        super().run(verdict)
        self._optimizer.share_settings()
        if not verdict.cause:
            self._optimizer.step_mark.touch()
        model = self._model
        gathered = model.reducer.grad_bytes_gathered
        if not verdict.cause:
            gathered += model.gather()
        model.bytes = {"bytes_reduced": model.reducer.bytes_reduced, "bytes_gathered": gathered}


class DistributedOptimizer(CompositeOptimizer):
    """ZeRO over the ranks of ``process_groups.dp``. Collective: all of these ranks build, step and
    clear the optimizer in the same order. All ranks start from the parameters of the first rank.

    ``state`` and ``state_dict`` have this rank's part, as flat shards with the parameters' shapes
    (:class:`~mp_optim.core.flat_shard.FlatShard`). With ``no_shard`` state is plain tensors. A
    parameter that no rank used has a gradient of zeros.

    Args:
        param_groups: groups of the model's parameters, with ``param_names``.
        config: ``data_parallel_sharding_strategy``, and settings of reducing and gathering.
        grad_scaler: loss scale; None for 1.
        build: takes groups of this rank's tensors, and returns a precision wrapper over them.
        process_groups: ``dp`` is required.
        model_chunks: modules that hold the parameters. Buckets are in the order of these modules.
            With ``overlap_param_gather`` the forwards of these modules wait for gathered
            parameters.
        divisor: divisor of gradients with ``grad_reduce_op="avg"``; by default the number of ranks
            of ``dp``.

    Attributes:
        shards: the precision wrapper of this rank's tensors, the only member.
        grad_reducer: reduces gradients over the ranks.

    Raises:
        ValueError: a parameter cannot be a view of a flat bucket; the message names the parameter.
            Or model, groups or config differ between ranks; the message has the rank and the
            difference.
    """

    grads_of = ReducedGrads
    grad_reducer: Reducer

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None = None,
        *,
        build: Build,
        process_groups: ProcessGroups,
        model_chunks: Sequence[nn.Module] = (),
        divisor: int | None = None,
    ) -> None:
        if process_groups.dp is None:
            raise ValueError(
                "process_groups.dp=None: a DistributedOptimizer needs the data-parallel ranks; "
                "pass ProcessGroups(dp=group)"
            )
        self.process_groups = process_groups
        self._group: ProcessGroup = process_groups.dp
        self._guard = naming_missing_ranks(self._group)
        super().__init__([with_names(group) for group in param_groups], {}, config, grad_scaler)
        in_forward = [slot for _, slot, _ in in_forward_order(self.param_groups, model_chunks)]
        lines = _of_construction(config, self.param_groups, in_forward)
        doing = "comparing the ranks' models and configs"
        check_agreement((self._group,), lines, self.device, doing, _OURS)
        self._model = ShardedParams(
            self.param_groups, config, self._group, model_chunks, divisor, self._guard
        )
        self.grad_reducer = self._model.reducer
        self.shards = build(self._model.groups())
        self.shards.engine.mains.layout_of = self._model.layout_of
        self.groups_below = [self.shards.param_groups, *self.shards.groups_below]
        self.take_members([self.shards])
        _show_settings(self, sharded=not self._model.steps_everything)
        # A callback makes backward wait for earlier reductions. So register one only if jobs during
        # backward need it.
        if self.backward_schedulers:
            # The reducer must not keep this optimizer alive, so do not refer to `self`.
            shards, tensors = self.shards, self._model.tensors
            self.grad_reducer.on_reduced = lambda bucket: shards.gradients_ready(tensors[bucket])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group. This works only inside the constructor, before the buckets are made.

        Raises:
            ValueError: the buckets exist already.
        """
        if self.members:
            raise ValueError(
                "add_param_group: a DistributedOptimizer creates its buckets once; build a new "
                "optimizer for all groups, and load the state of the present optimizer with "
                "mp_optim.checkpoint"
            )
        super().add_param_group(param_group)

    def share_settings(self) -> None:
        # The wrapper has its own groups, so copy settings between the groups of this optimizer and
        # the wrapper's groups.
        SlotKeyedOptimizer.share_settings(self)

    def locate(self, slot: Slot) -> tuple[MegatronOptimizer, Slot]:
        return self.shards, slot

    # -- communication ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context for all backward passes of a step except the last. Inside the context,
        gradients are added on this rank and not reduced.

        With ``optim_grads``, every backward pass outside of the context is reduced. Inside the
        context, the gradients of all elements are kept until the next reduction.
        """
        with self.grad_reducer.no_sync():
            yield

    @in_own_modes
    def finish_grad_sync(self) -> None:
        self._follow_buckets()
        self.grad_reducer.finish()

    def finish_param_sync(self) -> None:
        self._model.gatherer.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``grad``, ``main_grad`` and reduced gradients.

        Args:
            set_to_none: ignored, for compatibility with torch; ``grad`` always becomes None.
        """
        super().zero_grad(set_to_none=True)
        self.grad_reducer.zero()

    # -- parameters and state of this rank's shards -----------------------------------------------

    @in_own_modes
    def make_current(self, slot: Slot | None = None, *, follow_only: bool = False) -> None:
        self._follow_buckets(slot)
        # Buckets detect only parameters that were replaced or moved. The wrapper compares values,
        # and so finds all other writes.
        self.shards.make_current(slot, follow_only=follow_only)

    def _follow_buckets(self, slot: Slot | None = None) -> None:
        """Copy parameters that were replaced or moved into the buckets. Do nothing if ``slot`` is
        given and its parameter is unchanged."""
        self.finish_param_sync()
        if self._model.follow(slot):
            # State may be read before the next step, so refresh the main params of the changed
            # parameters now.
            self.shards.make_current(follow_only=True)
            self._model.look()

    def sharers(self) -> Iterator[tuple[str, tuple[ProcessGroup, ...]]]:
        for name, groups in super().sharers():
            yield name, tuple(dict.fromkeys((self._group, *groups)))

    @in_own_modes
    def show_written_params(self) -> None:
        self._model.gather(waits=True)
        super().show_written_params()

    @in_own_modes
    def take_model_params(self, values: Mapping[str, Any]) -> None:
        self.make_current(follow_only=True)
        local = {
            shard.name: shard.localize(MASTER, values[shard.name])
            for shard in self._model.shards.values()
            if shard.name in values
        }
        super().take_model_params(local)
        self._model.look()

    # -- main params and metrics -------------------------------------------------------------------

    def own_metrics(self) -> dict[str, float]:
        """Return the metrics of the wrapper, and the bytes of gradients that were reduced and of
        parameters that were gathered in the last step."""
        return {**super().own_metrics(), **self._model.bytes}


def _of_construction(
    config: OptimizerConfig, groups: ParamGroups, in_forward: Sequence[Slot]
) -> list[str]:
    """Return lines about config, parameters and settings, which ranks compare in the constructor.

    Args:
        config: the config.
        groups: groups of the model's parameters.
        in_forward: slots of the trained parameters, in the order in which forward is expected to
            use them.
    """
    lines = of_config(config)
    for slot, param in iter_slots(groups):
        marks = norm_attributes(param)
        said = {name: str(mark) for name, mark in marks.items() if mark}
        lines.append(
            f"group {slot.group} position {slot.position}: {slot_name(groups, slot)} "
            f"{tuple(param.shape)} {param.dtype} "
            f"{'trained' if param.requires_grad else 'frozen'}{said or ''}"
        )
    for place, slot in enumerate(in_forward):
        lines.append(f"place {place} in forward: {slot_name(groups, slot)}")
    return lines + of_groups(groups)


def _show_settings(optimizer: DistributedOptimizer, sharded: bool) -> None:
    """Copy hyperparameters that the caller did not give from the wrapper's groups, and set
    ``main_param`` of the model's parameters as Megatron does."""
    shards = optimizer.shards
    optimizer.defaults.update(shards.defaults)
    shown = shown_mains_of(optimizer)
    groups = zip(optimizer.param_groups, shards.param_groups, strict=True)
    for index, (group, of_shards) in enumerate(groups):
        group.update({**group_settings(of_shards), **group})
        params = zip(group["params"], of_shards["params"], strict=True)
        for position, (param, tensor) in enumerate(params):
            if (main := main_param_of(tensor)) is not None:
                set_main_param(shown, Slot(index, position), param, main, sharded=sharded)
