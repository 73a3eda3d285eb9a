"""DistributedOptimizer: data-parallel ranks share out main params, state and (ZeRO-2) gradients.

The model's parameters look into flat buckets. What a rank owns of each is a plain tensor, and an
ordinary precision wrapper over these tensors, in the same groups and at the same positions, does
all the work of a step: it measures (reducing over the ranks), decides, places and steps. This
module gets gradients to it and parameters back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.distributed import statements
from mp_optim.distributed.buckets import Entry
from mp_optim.distributed.composite import CompositeOptimizer
from mp_optim.distributed.param_shards import ParamShard, ParamWatcher, ShardState, make_shard
from mp_optim.distributed.transport import Reducer, Transport, make_transport
from mp_optim.precision import MegatronGradScaler, MegatronOptimizer, Verdict
from mp_optim.precision.device_verdict import DeviceVerdict
from mp_optim.precision.measure import Measurement, NormKey
from mp_optim.precision.step_grads import GradsOfParts, StepGrads
from mp_optim.precision.wrapped_optimizer import WrappedOptimizer
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.ranks.agreement import check_agreement, check_number
from mp_optim.ranks.missing_ranks import learn_addresses, naming_missing_ranks
from mp_optim.ranks.process_groups import ProcessGroups
from mp_optim.slots import Slot, group_settings, iter_slots, with_names
from mp_optim.slots.param_attributes import main_param_of, set_main_grad, set_main_param
from mp_optim.slots.slot_state import SlotState
from mp_optim.slots.state_keys import MASTER

__all__ = ["DistributedOptimizer"]

Build = Callable[[list[dict[str, Any]]], WrappedOptimizer]


class DistributedOptimizer(CompositeOptimizer):
    """ZeRO over the ranks of ``process_groups.dp``. Collective: all of them build it, step it and
    zero it alike. They start from the first one's parameters.

    ``state`` and ``state_dict`` show what this rank owns, as flat shards of the natural shape
    (:class:`~mp_optim.checkpoint.flat.FlatShard`), or plain tensors where every rank has
    everything. Gradients of parameters that no rank used are zeros.

    Args:
        param_groups: groups of the model's parameters, with ``param_names``.
        config: ``data_parallel_sharding_strategy`` and what is said there about reducing and
            gathering.
        grad_scaler: loss scale, or None for 1.
        build: makes the precision wrapper from groups of the owned tensors.
        process_groups: ``dp`` is required.
        model_chunks: modules that hold the parameters; in their order gradients are expected, and
            before their forwards gathered parameters are waited for.
        divisor: what sums of gradients are divided by with ``grad_reduce_op="avg"``; by default the
            ranks of ``dp``.

    Attributes:
        shards: the wrapper of the owned tensors, its only part.
        steps_everything: whether every rank steps all parameters, rather than what it owns.

    Raises:
        ValueError: a parameter cannot become part of a flat buffer, or the ranks disagree about
            model, groups or config; naming the parameter, or the rank and the difference.
    """

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
                "process_groups.dp is None: a DistributedOptimizer needs the data-parallel ranks"
            )
        self.process_groups = process_groups
        self._group: ProcessGroup = process_groups.dp
        self._guard = naming_missing_ranks(self._group)
        self.steps_everything = config.data_parallel_sharding_strategy == "no_shard"
        self._frozen: list[Slot] = []
        self._bytes = {"bytes_reduced": 0, "bytes_gathered": 0}
        super().__init__([with_names(group) for group in param_groups], {}, config, grad_scaler)
        self._check_construction(model_chunks)
        self._transport = self._make_transport(list(model_chunks), divisor or self._group.size())
        self._shards = {slot: self._shard(slot, p) for slot, p in iter_slots(self.param_groups)}
        self._index = {slot: index for index, slot in enumerate(self._shards)}
        self._watched = ParamWatcher(self.get_parameters())
        self.shards = build([self._group_of_shards(i) for i in range(len(self.param_groups))])
        self.take_parts([self.shards])
        self._adopt_settings()
        self._transport.reducer.on_reduced = self._on_reduced

    # -- building ---------------------------------------------------------------------------------

    def _check_construction(self, chunks: Sequence[nn.Module]) -> None:
        """Compare with the other ranks."""
        in_forward = [slot for _, slot, _ in self._in_forward(chunks)]
        lines = statements.of_construction(self.config, self.param_groups, in_forward)
        with self._guard("comparing the ranks' models and configs"):
            check_agreement(self._group, lines, "an optimizer")
            learn_addresses(self._group)

    def _in_forward(self, chunks: Sequence[nn.Module]) -> list[tuple[int, Slot, Tensor]]:
        """Trained parameters in the order in which forward is expected to use them, with their
        places in the model."""
        params = (param for chunk in chunks for param in chunk.parameters())
        places = {id(param): place for place, param in enumerate(params)}
        trained = [
            (places.get(id(param), 0), slot, param)
            for slot, param in iter_slots(self.param_groups)
            if param.requires_grad
        ]
        return sorted(trained, key=lambda item: item[:2])

    def _make_transport(self, chunks: list[nn.Module], divisor: int) -> Transport:
        trained = self._in_forward(chunks)
        transport = make_transport(
            [param for *_, param in trained],
            [self.slot_name(slot) for _, slot, _ in trained],
            [place for place, *_ in trained],
            self.config,
            self._group,
            chunks,
            divisor,
            self._guard,
        )
        slot_of = {id(param): slot for _, slot, param in trained}
        self._entries: dict[Slot, tuple[int, Entry]] = {}
        for index, bucket in enumerate(transport.buckets):
            for entry in bucket.entries:
                self._entries[slot_of[id(entry.param)]] = index, entry
        return transport

    def _shard(self, slot: Slot, param: Tensor) -> ParamShard:
        config, located = self.config, self._entries.get(slot)
        return make_shard(
            self.slot_name(slot),
            param,
            None if located is None else (self._transport.buckets[located[0]], located[1]),
            shard_groups=() if self.steps_everything else (self._group,),
            everything=self.steps_everything,
            keeps_shape=self.steps_everything or config.use_layer_wise_distributed_optimizer,
            placed_alike=RULES[config.optimizer].reads == "sums",  # ranks meet in its reductions
        )

    def _group_of_shards(self, index: int) -> dict[str, Any]:
        group = self.param_groups[index]
        slots = [Slot(index, position) for position in range(len(group["params"]))]
        tensors = [self._shards[slot].tensor for slot in slots]
        names = group.get("param_names")
        params = list(zip(names, tensors, strict=True)) if names else tensors
        return {**group_settings(group), "params": params}

    def _adopt_settings(self) -> None:
        """Show the hyperparameters that the rule filled in, and the sharded main params where
        Megatron does."""
        self.defaults.update(self.shards.defaults)
        for group, of_shards in zip(self.param_groups, self.shards.param_groups, strict=True):
            for key, value in group_settings(of_shards).items():
                group.setdefault(key, value)
            for param, tensor in zip(group["params"], of_shards["params"], strict=True):
                if (main := main_param_of(tensor)) is not None:
                    set_main_param(param, main, sharded=not self.steps_everything)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before the buckets are made.

        Raises:
            ValueError: they are.
        """
        if self.parts:
            raise ValueError(
                "a DistributedOptimizer's buckets are made once: build a new optimizer for all "
                "groups, "
                "and give it this one's state with mp_optim.checkpoint"
            )
        super().add_param_group(param_group)

    def locate(self, slot: Slot) -> tuple[MegatronOptimizer, Slot]:
        return self.shards, slot

    # -- communication ----------------------------------------------------------------------------

    @property
    def grad_reducer(self) -> Reducer:
        """What reduces the gradients."""
        return self._transport.reducer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add up this rank's own gradients and reduce nothing; for all but
        the last of a step. With ``optim_grads`` the buckets are kept whole until the next
        reduction."""
        with self._transport.reducer.no_sync():
            yield

    def finish_grad_sync(self) -> None:
        self.follow_model()
        self._transport.reducer.finish()

    def finish_param_sync(self) -> None:
        self._transport.gatherer.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and ``main_grad`` and what was reduced."""
        super().zero_grad(set_to_none=True)
        self._transport.reducer.zero()

    def _on_reduced(self, bucket: int) -> None:
        """The owned gradients of a bucket are what will be stepped: host work may begin during
        backward."""
        slots = [slot for slot, (index, _) in self._entries.items() if index == bucket]
        self.shards.gradients_ready([self._shards[slot].tensor for slot in slots])

    # -- the step ---------------------------------------------------------------------------------

    def collect_grads(self) -> StepGrads:
        """Reduce the gradients, and compare hyperparameters with the other ranks."""
        self.finish_grad_sync()
        trained = self._hand_out_grads()
        with self._guard("comparing hyperparameters"):
            check_number(self._group, self._statements_of_step, self.device, "an optimizer")
        for group, of_shards in zip(self.param_groups, self.shards.param_groups, strict=True):
            of_shards.update(group_settings(group))
        return ReducedGrads(self, trained, self.shards.collect_grads())

    def _hand_out_grads(self) -> list[Slot]:
        """Let the owned tensors have gradients where the parameter is trained now; returns the
        slots."""
        trained: list[Slot] = []
        self._frozen = []
        for slot, param in iter_slots(self.param_groups):
            shard = self._shards[slot]
            if param.requires_grad and shard.grad is None:
                raise RuntimeError(
                    f"{self.slot_name(slot)} was frozen when the optimizer was built and "
                    "is in no bucket; build the optimizer again to train it"
                )
            set_main_grad(shard.tensor, shard.grad if param.requires_grad else None)
            if param.requires_grad:
                trained.append(slot)
            elif shard.grad is not None:
                self._frozen.append(slot)
        return trained

    def _statements_of_step(self) -> list[str]:
        step, rounds = self._counts["steps"] + 1, self.grad_reducer.rounds
        return statements.of_step(self.param_groups, step, rounds, self._frozen)

    def agreeing(self) -> contextlib.AbstractContextManager[Any]:
        """Names the ranks that are missing when the norm is agreed on."""
        guard: contextlib.AbstractContextManager[Any] = self._guard("agreeing on the gradient norm")
        return guard

    def owned_sums(self, trained: Sequence[Slot]) -> Measurement:
        """Sums of squares of what this rank would own of the reduced gradients, agreed with all
        ranks: where each steps everything, the sum is made of the same parts as with sharding."""
        keys = {slot: self._owned_norm_key(slot) for slot in self.slots()}
        grads = [self._owned_grad(slot) for slot in trained]
        distinct = list(dict.fromkeys(keys.values()))
        return self.shards.measure_grads(grads, [keys[slot] for slot in trained], distinct)

    def _owned_norm_key(self, slot: Slot) -> NormKey:
        return NormKey(self.norm_key(slot).group, (self._group,))

    def _owned_grad(self, slot: Slot) -> Tensor:
        if slot not in self._entries:
            return torch.empty(0, dtype=torch.float32, device=self.device)
        index, entry = self._entries[slot]
        return self._transport.buckets[index].owned_grad(entry)

    def gather_params(self, is_stepped: bool) -> None:
        """After the step: bring the other ranks' parts of the parameters here.

        Args:
            is_stepped: whether anything was written.
        """
        reducer, gatherer = self._transport.reducer, self._transport.gatherer
        gathered = reducer.bytes_gathered
        if is_stepped:
            self.step_mark.touch()
            if not self.steps_everything:
                gatherer.start()
                gathered += gatherer.bytes_gathered
            params = self.get_parameters()
            increment_version([entry.param for _, entry in self._entries.values()])
            self._watched.look(params)
        self._bytes = {"bytes_reduced": reducer.bytes_reduced, "bytes_gathered": gathered}

    def verdict_device(self) -> torch.device | None:
        """None: ranks that have to compare numbers every step wait for the device all the same."""
        return None

    # -- parameters and state: what this rank owns ------------------------------------------------

    @in_own_modes
    def follow_model(self, slot: Slot | None = None) -> None:
        self._transport.gatherer.finish()
        if slot is not None and self._watched.is_same(self._index[slot], self.param(slot)):
            self.shards.follow_model(slot)
            return
        params = self.get_parameters()
        changed = self._watched.changed(params)
        slots = self.slots() if changed else []
        for index in changed:
            if slots[index] in self._entries:
                self._follow_param(slots[index], params[index])
        if changed:
            # copies on the host follow now: state may be read before the next step
            self.shards.follow_model()
            self._watched.look(params)

    def _follow_param(self, slot: Slot, param: Tensor) -> None:
        """Take a replaced or written parameter into its bucket."""
        index, entry = self._entries[slot]
        if param is not entry.param or param.data_ptr() != entry.data.data_ptr():
            is_replaced = param is not entry.param
            self._transport.buckets[index].adopt(entry, param)
            if is_replaced:
                self._transport.reducer.watch(index, entry)
                self._transport.gatherer.look()
        increment_version(self._shards[slot].tensor)

    def state_of(self, slot: Slot) -> SlotState:
        return ShardState(super().state_of(slot), self._shards[slot], self.param(slot))

    def main_param(self, slot: Slot) -> Tensor:
        self.step_mark.check("main_param")
        self.follow_model(slot)
        main, param = super().main_param(slot), self.param(slot)
        if not param.requires_grad:
            return param
        shown: Tensor = self._shards[slot].show(MASTER, main.detach())
        return shown

    def param_checksums(self) -> list[int | None]:
        if self.steps_everything:
            return super().param_checksums()
        return [None] * len(self._shards)  # a checksum is of the whole parameter

    @in_own_modes
    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        self.follow_model()
        values = {
            shard.name: shard.own(MASTER, state_dict[shard.name])
            for shard in self._shards.values()
            if state_dict and shard.name in state_dict
        }
        super().reload_model_params(values)
        self._watched.look(self.get_parameters())

    # -- what is going on -------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """As of every optimizer; and bytes of gradients and parameters that were reduced and
        gathered in the last step, counted once each, whatever way they took."""
        return {**super().metrics(), **self._bytes}


class ReducedGrads(GradsOfParts):
    """What a rank owns of the reduced gradients.

    Args:
        trained: slots with a gradient. owned: the wrapper's gradients of the owned tensors.
    """

    def __init__(
        self, optimizer: DistributedOptimizer, trained: Sequence[Slot], owned: StepGrads
    ) -> None:
        super().__init__([owned])
        self._optimizer, self._trained = optimizer, trained

    def has_any(self) -> bool:
        """Whether any came from a backward pass of this rank; the others are zeros."""
        return self._optimizer.grad_reducer.has_gradients

    def sums(self) -> Measurement:
        with self._optimizer.agreeing():
            if self._optimizer.steps_everything:
                return self._optimizer.owned_sums(self._trained)
            return super().sums()

    def apply(self, verdict: Verdict | DeviceVerdict) -> None:
        super().apply(verdict)
        self._optimizer.gather_params(not (isinstance(verdict, Verdict) and verdict.skip))
