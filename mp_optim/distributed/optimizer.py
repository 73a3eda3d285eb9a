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
from mp_optim.distributed.param_shards import ParamShard, ParamWatcher, ShardState, make_fragment
from mp_optim.distributed.transport import Reducer, Transport, make_transport
from mp_optim.precision import MegatronGradScaler, MegatronOptimizer, Verdict
from mp_optim.precision.backward_overlap import BackwardOverlap
from mp_optim.precision.description import Description
from mp_optim.precision.device_verdict import DeviceVerdict
from mp_optim.precision.measure import Measurement, NormKey
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.ranks.agreement import check_agreement, check_number
from mp_optim.ranks.missing_ranks import learn_addresses, naming_missing_ranks
from mp_optim.ranks.process_groups import ProcessGroups
from mp_optim.slots import Slot, SlotStateView, SlotUpdate, iter_slots, with_names
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.slot_state import SlotState
from mp_optim.slots.state_keys import MASTER

__all__ = ["DistributedOptimizer"]

Build = Callable[[list[dict[str, Any]]], MegatronOptimizer]
_NOT_PUSHED = ("params", "param_names")


class DistributedOptimizer(MegatronOptimizer):
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
        self.config, self.grad_scaler, self.process_groups = config, grad_scaler, process_groups
        self._group: ProcessGroup = process_groups.dp
        self._strategy = config.data_parallel_sharding_strategy
        self._last: Verdict | DeviceVerdict = Verdict()
        self._graphed, self._grads = None, None
        self._trained: list[Slot] = []
        self._frozen: list[Slot] = []
        self._counts = {"steps": 0, "skipped_steps": 0}
        self._guard = naming_missing_ranks(self._group)
        self._state_view = SlotStateView(
            lambda: self.param_groups, self.slot_state, self.load_slot_state
        )
        self._built = False
        torch.optim.Optimizer.__init__(self, [with_names(group) for group in param_groups], {})
        with self._guard("comparing the ranks' models and configs"):
            check_agreement(
                self._group,
                statements.of_construction(
                    config,
                    self.param_groups,
                    [slot for _, slot, _ in self._in_forward(model_chunks)],
                ),
                "an optimizer",
            )
            learn_addresses(self._group)
        self._transport = self._make_transport(list(model_chunks), divisor or self._group.size())
        self._fragments = {
            slot: self._fragment(slot, p) for slot, p in iter_slots(self.param_groups)
        }
        self._watched, self._index = (
            ParamWatcher(self._params()),
            {slot: at for at, slot in enumerate(self._fragments)},
        )
        self.shards = build(self._groups_of_fragments())
        self._adopt_settings()
        self._transport.reducer.on_reduced = self._tell_of_gradients
        self._bytes = {"bytes_reduced": 0, "bytes_gathered": 0}
        self._built = True
        self.use_mark(StepMark())

    # -- building -------------------------------------------------------------------------------

    def _said_each_step(self) -> list[str]:
        return statements.of_step(
            self.param_groups,
            self._counts["steps"] + 1,
            getattr(self.grad_reducer, "rounds", 0),
            self._frozen,
        )

    @property
    def _steps_everything(self) -> bool:
        return self._strategy == "no_shard"

    def _in_forward(self, chunks: Sequence[nn.Module]) -> list[tuple[int, Slot, Tensor]]:
        """Trained parameters in the order in which forward is expected to use them, with their
        places in the model."""
        order = {
            id(param): at
            for at, param in enumerate(p for chunk in chunks for p in chunk.parameters())
        }
        return sorted(
            (
                (order.get(id(param), 0), slot, param)
                for slot, param in iter_slots(self.param_groups)
                if param.requires_grad
            ),
            key=lambda item: item[:2],
        )

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
        self._entries = {
            slot_of[id(entry.param)]: (index, entry)
            for index, bucket in enumerate(transport.buckets)
            for entry in bucket.entries
        }
        return transport

    def _fragment(self, slot: Slot, param: Tensor) -> ParamShard:
        config, found = self.config, self._entries.get(slot)
        return make_fragment(
            self.slot_name(slot),
            param,
            None if found is None else (self._transport.buckets[found[0]], found[1]),
            shard_groups=() if self._steps_everything else (self._group,),
            everything=self._steps_everything,
            keeps_shape=self._steps_everything or config.use_layer_wise_distributed_optimizer,
            placed_alike=RULES[config.optimizer].reads == "sums",
        )  # ranks meet in its reductions

    def _groups_of_fragments(self) -> list[dict[str, Any]]:
        groups = []
        for index, group in enumerate(self.param_groups):
            tensors = [
                self._fragments[Slot(index, at)].tensor for at in range(len(group["params"]))
            ]
            names = group.get("param_names")
            plain = {key: value for key, value in group.items() if key not in _NOT_PUSHED}
            groups.append(
                {**plain, "params": list(zip(names, tensors, strict=True)) if names else tensors}
            )
        return groups

    def _adopt_settings(self) -> None:
        """Show the hyperparameters that the rule filled in, and the sharded main params where
        Megatron does."""
        self.defaults.update(self.shards.defaults)
        for mine, theirs in zip(self.param_groups, self.shards.param_groups, strict=True):
            for key, value in theirs.items():
                if key not in _NOT_PUSHED:
                    mine.setdefault(key, value)
            for param, tensor in zip(mine["params"], theirs["params"], strict=True):
                if hasattr(tensor, "main_param"):
                    param.main_param, param.main_param_sharded = (
                        tensor.main_param,
                        not self._steps_everything,
                    )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only before the buckets are made.

        Raises:
            ValueError: they are.
        """
        if getattr(self, "_built", False):
            raise ValueError(
                "a DistributedOptimizer's buckets are made once: build a new optimizer for all "
                "groups, "
                "and give it this one's state with mp_optim.checkpoint"
            )
        torch.optim.Optimizer.add_param_group(self, param_group)

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """What steps the owned tensors."""
        return self.shards.optimizer

    def use_mark(self, mark: StepMark) -> None:
        self.step_mark = mark
        self.shards.use_mark(mark)

    def recover(self) -> None:
        self.shards.recover()

    # -- gradients ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add up this rank's own gradients and reduce nothing; for all but
        the last of a step. With ``optim_grads`` the buckets are kept whole until the next
        reduction."""
        with self._transport.reducer.no_sync():
            yield

    def finish_grad_sync(self) -> None:
        """Reduce what has not been reduced, and wait; :meth:`step` does so itself."""
        self.follow_model()
        self._transport.reducer.finish()

    def finish_param_sync(self) -> None:
        """Wait until all parameters have their new values, which forward otherwise does module by
        module."""
        self._transport.gatherer.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and ``main_grad`` and what was reduced."""
        super().zero_grad(set_to_none=True)
        self._transport.reducer.zero()

    def _tell_of_gradients(self, index: int) -> None:
        """The owned gradients of a bucket are what will be stepped: host work may begin during
        backward."""
        if hasattr(self.shards, "gradients_ready"):
            self.shards.gradients_ready(
                [
                    fragment.tensor
                    for slot, fragment in self._fragments.items()
                    if self._entries.get(slot, (-1,))[0] == index
                ]
            )

    @property
    def grad_reducer(self) -> Reducer:
        """What reduces the gradients."""
        return self._transport.reducer

    def fragments(self) -> Iterator[tuple[Slot, ParamShard]]:
        """What this rank owns of each parameter, in slot order."""
        yield from self._fragments.items()

    # -- the step -------------------------------------------------------------------------------

    @in_own_modes
    def follow_model(self, slot: Slot | None = None) -> None:
        self._transport.gatherer.finish()
        if slot is not None and self._watched.is_same(self._index[slot], self._param(slot)):
            self.shards.follow_model(slot)
            return
        params = self._params()
        changed = self._watched.changed(params)
        slots = self.slots() if changed else []
        for at in changed:
            slot, param = slots[at], params[at]
            if (found := self._entries.get(slot)) is None:
                continue
            index, entry = found
            if param is not entry.param or param.data_ptr() != entry.data.data_ptr():
                replaced = param is not entry.param
                self._transport.buckets[index].adopt(entry, param)
                if replaced:
                    self._transport.reducer.watch(index, entry)
                    self._transport.gatherer.look()
            increment_version(self._fragments[slot].tensor)
        if changed:
            # copies on the host follow now: somebody may read state before the next step
            self.shards.follow_model()
            self._watched.look(params)

    def gather(self) -> None:
        """Reduce the gradients, and compare hyperparameters with the other ranks."""
        self.finish_grad_sync()
        self._trained = self._hand_out_gradients()
        with self._guard("comparing hyperparameters"):
            check_number(self._group, self._said_each_step, self.device, "an optimizer")
        self._push_settings()
        self.shards.gather()

    def has_gradients(self) -> bool:
        """Whether any came from a backward pass of this rank; the others are zeros."""
        return self._transport.reducer.has_gradients

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank owns of the reduced gradients."""
        return self.shards.named_gradients()

    def _push_settings(self) -> None:
        for mine, theirs in zip(self.param_groups, self.shards.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key not in _NOT_PUSHED})

    def sums(self) -> Measurement:
        """Sums of squares of the reduced gradients, agreed with all ranks."""
        with self._guard("agreeing on the gradient norm"):
            return (
                self._measure_owned(self._trained) if self._steps_everything else self.shards.sums()
            )

    @property
    def backward_link(self) -> BackwardOverlap:  # type: ignore[override]
        return self.shards.backward_link

    def forget_grads(self) -> None:
        self.shards.forget_grads()

    def _hand_out_gradients(self) -> list[Slot]:
        """Let the owned tensors have gradients where the parameter is trained now; returns the
        slots."""
        trained: list[Slot] = []
        self._frozen = []
        for slot, param in iter_slots(self.param_groups):
            fragment = self._fragments[slot]
            if param.requires_grad and fragment.grad is None:
                raise RuntimeError(
                    f"{self.slot_name(slot)} was frozen when the optimizer was built and "
                    "is in no bucket; build the optimizer again to train it"
                )
            fragment.tensor.main_grad = fragment.grad if param.requires_grad else None  # type: ignore[attr-defined]
            if param.requires_grad:
                trained.append(slot)
            elif fragment.grad is not None:
                self._frozen.append(slot)
        return trained

    def _measure_owned(self, trained: list[Slot]) -> Measurement:
        """Each rank measures what it would own, so that the sum is made of the same parts as with
        sharding."""
        grads, keys = [], []
        own_keys = {slot: self._norm_key_of(slot) for slot in self.slots()}
        for slot in trained:
            found = self._entries.get(slot)
            grads.append(
                torch.empty(0, dtype=torch.float32, device=self.device)
                if found is None
                else self._transport.buckets[found[0]].owned_grad(found[1])
            )
            keys.append(own_keys[slot])
        return self.shards.measure_grads(grads, keys, list(dict.fromkeys(own_keys.values())))

    def _norm_key_of(self, slot: Slot) -> NormKey:
        key = self.shards.norm_key(slot)
        return NormKey(key.group, (self._group,))

    def verdict_device(self) -> torch.device | None:
        """None: ranks that have to compare numbers every step wait for the device all the same."""
        return None

    def reduces(self) -> bool:
        return True

    def apply(self, verdict: Verdict | DeviceVerdict) -> None:
        """Step what this rank owns, and gather what the others did."""
        self.follow(verdict)
        self.shards.apply(verdict)
        gathered = self._transport.reducer.bytes_gathered
        if not (isinstance(verdict, Verdict) and verdict.skip):
            self.step_mark.touch()
            if not self._steps_everything:
                self._transport.gatherer.start()
                gathered += self._transport.gatherer.bytes_gathered
            params = self._params()
            increment_version([entry.param for _, entry in self._entries.values()])
            self._watched.look(params)
        self._bytes = {
            "bytes_reduced": self._transport.reducer.bytes_reduced,
            "bytes_gathered": gathered,
        }

    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        raise NotImplementedError(
            "a DistributedOptimizer is stepped by step(); .shards steps owned tensors by slot"
        )

    def check_param(self, slot: Slot, param: Tensor) -> None:
        self.shards.check_param(slot, param)

    # -- state: what this rank owns ---------------------------------------------------------------

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        self.shards.allocate_state(slots)

    def state_of(self, slot: Slot) -> SlotState:
        return ShardState(self.shards.state_of(slot), self._fragments[slot], self._param(slot))

    def check_remainders(self, slot: Slot | None = None) -> None:
        self.shards.check_remainders(slot)

    def check_settings(self, group: dict[str, Any]) -> None:
        self.shards.check_settings(group)

    def param_checksums(self) -> list[int | None]:
        return (
            self.shards.param_checksums()
            if self._steps_everything
            else [None] * len(self._fragments)
        )

    def has_separate_main(self, slot: Slot) -> bool:
        return self.shards.has_separate_main(slot)

    def has_state(self, slot: Slot) -> bool:
        return self.shards.has_state(slot)

    def main_param(self, slot: Slot) -> Tensor:
        self.step_mark.check("main_param")
        self.follow_model(slot)
        main, param = self.shards.main_param(slot), self._param(slot)
        if not param.requires_grad:
            return param
        shown: Tensor = self._fragments[slot].show(MASTER, main.detach())
        return shown

    def norm_key(self, slot: Slot) -> NormKey:
        return self.shards.norm_key(slot)

    @property
    def has_quantized_params(self) -> bool:
        return self.shards.has_quantized_params

    @in_own_modes
    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        self.follow_model()
        values = {
            fragment.name: fragment.own(MASTER, state_dict[fragment.name])
            for fragment in self._fragments.values()
            if state_dict and fragment.name in state_dict
        }
        self.shards.reload_model_params(values)
        self._watched.look(self._params())

    def offload_to_cpu(self) -> None:
        self.shards.offload_to_cpu()

    def restore_from_cpu(self) -> None:
        self.shards.restore_from_cpu()

    # -- what is going on -----------------------------------------------------------------------

    def describe(self) -> Description:
        """Rows for what this rank owns."""
        return self.shards.describe()

    def metrics(self) -> dict[str, float]:
        """As of every optimizer; and bytes of gradients and parameters that were reduced and
        gathered in the last step, counted once each, whatever way they took."""
        return {**self.shards.metrics(), **self._bytes}
