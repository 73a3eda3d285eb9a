"""MegatronOptimizer: the outer shell of the stack. Measure, agree, decide, apply.

Its ``param_groups`` are live and hold the model's own parameters, so torch schedulers, DCP, accelerate
and the HF Trainer find what they expect. The wrapped optimizer's hold main params. The two are
connected by position only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.config import OptimizerConfig
from mp_optim.precision.backward import BackwardLink
from mp_optim.precision.columns import SlotColumns
from mp_optim.precision.description import Description, describe
from mp_optim.precision.grad_scaler import MegatronGradScaler
from mp_optim.precision.measure import (
    EXCLUDED,
    MAIN,
    Measurement,
    NormKey,
    agree,
    count_zeros,
    measure,
    norm_groups,
)
from mp_optim.precision.parking import Parking
from mp_optim.precision.sharded import as_local_state, as_sharded, shard_groups_of
from mp_optim.precision.verdict import Verdict, decide
from mp_optim.process_groups import ProcessGroups
from mp_optim.slot_optimizer import Closure, SlotOptimizer
from mp_optim.slots import (
    Slot,
    SlotUpdate,
    SteadyList,
    follow,
    iter_slots,
    local_tensor,
    same_memory,
    stream_of,
    with_names,
)
from mp_optim.update import as_slot_optimizer, choose_backend
from mp_optim.update.lists import REMAINDER, scale_key
from mp_optim.update.stored import MASTER, joined

__all__ = ["MegatronOptimizer"]


class MegatronOptimizer(SlotOptimizer):
    """Common part of the precision wrappers.

    Args:
        optimizer: any torch optimizer over the model's parameters. This package's own step in one pass
            from the gradients as they are; a foreign one gets FP32 ``.grad``.
        config: see :class:`mp_optim.OptimizerConfig`.
        grad_scaler: loss scale, or None for 1.
        init_state_fn: accepted for drop-in use; state is allocated by :meth:`init_state`.
        process_groups: whom to agree with on the gradient norm.

    Raises:
        TypeError, ValueError: a parameter's dtype does not fit, naming it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig,
                 grad_scaler: MegatronGradScaler | None = None, init_state_fn: Any = None, *,
                 process_groups: ProcessGroups | None = None) -> None:
        self.config = config
        self.optimizer = optimizer
        self.inner = as_slot_optimizer(optimizer)
        self.grad_scaler = grad_scaler
        self.process_groups = process_groups or ProcessGroups()
        self._seen = SlotColumns()
        self._grads: tuple[list[int], SteadyList] | None = None
        self._norm_groups: list[str] | None = None
        self._verdict = Verdict()
        self._counts = {"steps": 0, "skipped_steps": 0, "reloaded_params": 0}
        self._parking = Parking()
        super().__init__([with_names(group) for group in self.inner.param_groups], dict(optimizer.defaults))
        for index in range(len(self.param_groups)):
            self._bind_group(index)
        self.backward_link = BackwardLink(self, self._seen, self._sum_of_squares, self._push_settings)
        self.backward_link.follow(self._seen.params)

    @abstractmethod
    def check_param(self, slot: Slot, param: Tensor) -> None:
        """Raise if a trainable parameter's dtype does not fit this wrapper."""

    # -- slots and main params ------------------------------------------------------------------

    @torch.no_grad()
    def _bind_group(self, index: int) -> None:
        seen = self._seen
        seen.first.append(len(seen.slots))
        for position, param in enumerate(self.param_groups[index]["params"]):
            slot = Slot(index, position)
            seen.see(slot, param, self._norm_key(slot, param))
            seen.separate.append(param.requires_grad and self._bind(slot, param))
            seen.bound.append(param.requires_grad)
            seen.streams.append(stream_of(self.slot_name(slot)))
        self._norm_groups = None

    def _bind(self, slot: Slot, param: Tensor) -> bool:
        """Give a trainable parameter its main param; returns whether that is another tensor."""
        self.check_param(slot, param)
        local = local_tensor(param)
        main = self.inner.new_main_param(slot, local)
        param.main_param = main  # type: ignore[attr-defined]
        return not same_memory(main, local)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group here and in the wrapped optimizer, with main params where they are needed."""
        super().add_param_group(param_group)
        if len(self.param_groups) <= len(self.inner.param_groups):  # torch's constructor is adding the first groups
            return
        added = self.param_groups[-1]
        self.inner.add_param_group(with_names(added))
        for key, value in self.inner.param_groups[-1].items():
            added.setdefault(key, value)
        self._bind_group(len(self.param_groups) - 1)
        self.backward_link.follow(self._seen.params)

    def _norm_key(self, slot: Slot, param: Tensor) -> NormKey:
        group = getattr(param, "grad_norm_group", None) or MAIN
        if getattr(param, "shared", False) or self._is_tensor_parallel_duplicate(slot, param):
            group = EXCLUDED
        return NormKey(group, shard_groups_of(self.slot_name(slot), param))

    def _is_tensor_parallel_duplicate(self, slot: Slot, param: Tensor) -> bool:
        expert = self.param_groups[slot.group].get("is_expert_parallel", False)
        tp = self.process_groups.expert_tp if expert else self.process_groups.tp
        return tp is not None and not getattr(param, "tensor_model_parallel", False) and tp.rank() > 0

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _main(self, slot: Slot) -> Tensor:
        main: Tensor = self.inner.param_groups[slot.group]["params"][slot.position]
        return main

    def has_separate_main(self, slot: Slot) -> bool:
        """Whether a slot is stepped on a tensor other than the model's parameter."""
        return self._seen.separate[self._seen.index(slot)]

    def _has_master(self, slot: Slot) -> bool:
        """Whether a slot of 16 bits is stepped on an FP32 tensor; else it is FP32 itself, or has a remainder."""
        param = self.param_groups[slot.group]["params"][slot.position]
        return (self.has_separate_main(slot) and param.dtype != torch.float32
                and self._main(slot).dtype == torch.float32)

    def has_state(self, slot: Slot) -> bool:
        """Whether a slot has ever been trainable; one that has not costs nothing."""
        return self._seen.bound[self._seen.index(slot)]

    def _sync(self) -> None:
        """Follow model tensors that were replaced or written from outside since the last step."""
        seen, params = self._seen, self._params()
        changed = seen.changed(params)
        for index in changed:
            slot, param = seen.slots[index], params[index]
            if seen.bound[index]:
                self._rebind(index, slot, param)
            seen.keys[index] = self._norm_key(slot, param)
        if changed:
            seen.look(params)
        self.backward_link.follow(params)

    def _rebind(self, index: int, slot: Slot, param: Tensor) -> None:
        main, local = self._main(slot), local_tensor(param)
        if self._seen.separate[index]:
            param.main_param = main  # type: ignore[attr-defined]
            self._counts["reloaded_params"] += follow(main, local, self.slot_name(slot))
            self.inner.written_outside(slot)
        elif param.dtype == main.dtype:
            self.inner.param_groups[slot.group]["params"][slot.position] = local
            param.main_param = local  # type: ignore[attr-defined]
            self.inner.written_outside(slot)
        else:  # it was cast: now it needs a main param, or has no place here
            self._seen.trained(index, self._bind(slot, param))

    @torch.no_grad()
    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Take the model's present values into the main params, dropping their extra bits.

        Needed only after writes that leave no trace (``param.data.copy_(...)``): others are noticed by themselves.

        Args:
            state_dict: full-precision values by FQN, used instead of the model's where given.
        """
        seen = self._seen
        for index, (slot, param) in enumerate(iter_slots(self.param_groups)):
            if seen.separate[index] or (seen.bound[index] and param.dtype != torch.float32):
                source = (state_dict or {}).get(self.slot_name(slot), param)
                self.inner.set_main_param(slot, local_tensor(source))
        seen.look(self._params())

    def named_main_params(self) -> Iterator[tuple[str, Tensor]]:
        """(FQN, FP32 tensor of the parameter's shape; a DTensor if the parameter is one), in slot order.

        The tensor is the live one, or a copy if the main param is stored as a remainder.
        """
        for slot, param in iter_slots(self.param_groups):
            whole = not self.has_state(slot) or (param.dtype == torch.float32 and not self.has_separate_main(slot))
            yield self.slot_name(slot), param if whole else as_sharded(self.inner.main_param(slot), param)

    # -- the step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One step: returns :class:`~mp_optim.precision.verdict.StepResult`, or the closure's loss if one is given.

        A step whose gradients hold an inf or nan, or whose norm exceeds
        ``config.grad_norm_skip_threshold``, changes nothing but the loss scale.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inv_scale = None if self.grad_scaler is None else self.grad_scaler.inv_scale
        with self._timed("optimizer-clip-main-grad"):
            verdict = decide(self.measure(), inv_scale, self.config)
        with self._timed("optimizer-inner-step"):
            self.apply(verdict)
        if self.grad_scaler is not None:
            self.grad_scaler.update(verdict.found_inf)
            for part in self.chained_optimizers:
                part.backward_link.remember_scale()
        return verdict.result if closure is None else loss

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self.config.timers is None:
            yield
            return
        timer = self.config.timers(name, log_level=1)
        timer.start(barrier=self.config.barrier_with_L1_time)
        try:
            yield
        finally:
            timer.stop()

    @property
    def device(self) -> torch.device:
        """Where the model's parameters lie."""
        return next((local_tensor(p).device for _, p in iter_slots(self.param_groups)), torch.device("cpu"))

    def measure(self) -> Measurement:
        """Sums of squares of this step's gradients, agreed with the other ranks."""
        if self._parking.occupied:
            raise RuntimeError("the optimizer is offloaded: call restore_from_cpu() before step()")
        if (schedule := self.backward_link.schedule) is not None:
            schedule.finish()
        self._sync()
        all_keys = self._seen.distinct_keys
        indices, grads = self._grads = self._seen.grads(self.slot_name)
        if not all(self._seen.bound):
            for index in (i for i in indices if not self._seen.bound[i]):  # it was frozen when its group was added
                self._seen.trained(index, self._bind(self._seen.slots[index], self._seen.params[index]))
        keys = self._seen.keys_of(indices)
        device = self.device
        sums = measure(grads, keys, all_keys, self._unknown_sums, device)
        zeros = count_zeros(grads, keys, all_keys, device) if self.config.log_num_zeros_in_grad else None
        ranks = self.process_groups.grad_stats
        if self._norm_groups is None or ranks is None:
            self._norm_groups = norm_groups(all_keys, ranks)
        return agree(sums, zeros, ranks, self._norm_groups)

    def _unknown_sums(self, grads: Sequence[Tensor]) -> Tensor:
        """Sums of squares, taken now where backward has not brought them already."""
        known = self.backward_link.known_sums(grads)
        unknown = [index for index, value in enumerate(known) if value is None]
        if len(unknown) == len(known):
            return self._sum_of_squares(grads)
        sums = torch.tensor([0.0 if value is None else value for value in known], dtype=torch.float64)
        if unknown:
            sums[torch.tensor(unknown)] = self._sum_of_squares([grads[index] for index in unknown])
        return sums

    def _sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        backend, _ = choose_backend(self.config.fused_backend, grads[0].device)
        return backend.sum_of_squares(grads)

    def apply(self, verdict: Verdict) -> None:
        """Step the slots that have a gradient, unless the verdict says skip."""
        self._verdict = verdict
        self._counts["steps"] += 1
        if self._grads is None:
            self._sync()
            self._grads = self._seen.grads(self.slot_name)
        (indices, grads), self._grads = self._grads, None
        if verdict.skip:
            self._counts["skipped_steps"] += 1
            if self.backward_link.schedule is not None:
                self.backward_link.schedule.skip()
            return
        norm = verdict.norms.get(MAIN)
        clipped = None if norm is None else min(norm, self.config.clip_grad) if self.config.clip_grad > 0 else norm
        self.step_slots(self._seen.updates(indices, grads, verdict.multipliers), grad_norm=clipped)
        self._seen.stepped()

    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        """Step given slots of the wrapped optimizer: what :meth:`step` does after its verdict."""
        self._push_settings()
        self.inner.step_slots(updates, grad_norm=grad_norm)

    def _push_settings(self) -> None:
        for mine, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in mine.items() if key not in ("params", "param_names")})

    # -- during backward ------------------------------------------------------------------------

    @property
    def is_last_microbatch(self) -> bool:
        """Whether gradients that arrive are complete, so that ``offload_mode`` may begin to work on them. Otherwise
        that work is done again after the micro-batches that follow: right, but not hidden."""
        return all(s.enabled for part in self.chained_optimizers if (s := part.backward_link.schedule) is not None)

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        for part in self.chained_optimizers:
            if part.backward_link.schedule is not None:
                part.backward_link.schedule.enabled = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all micro-batches but the last: nothing is begun during backward."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def gradients_ready(self, params: Iterable[Tensor] | None = None) -> None:
        """The gradients of these parameters (by default all) are what will be stepped: ``offload_mode`` may begin.

        To be called by whoever reduces gradients over ranks; in a job of one rank, and for FSDP2, backward itself
        says it.
        """
        mine = None if params is None else list(params)
        for part in self.chained_optimizers:
            part.backward_link.ready(part.get_parameters() if mine is None else mine)

    def discard_early_work(self) -> None:
        """Forget what was done during backward; ``step()`` does it again.

        Needed only after gradients were written without a trace (``param.grad.data.mul_(...)``): other writes are
        noticed by themselves.
        """
        for part in self.chained_optimizers:
            if part.backward_link.schedule is not None:
                part.backward_link.schedule.discard()

    # -- loss scale, gradients ------------------------------------------------------------------

    def get_loss_scale(self) -> Tensor:
        """FP32, shape (1,)."""
        return torch.ones(1) if self.grad_scaler is None else self.grad_scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale; call ``backward`` on the result."""
        return loss if self.grad_scaler is None else loss * self.grad_scaler.scale.to(loss.device).reshape(())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``grad`` and ``decoupled_grad``. ``main_grad`` belongs to whoever made it and is left alone."""
        super().zero_grad(set_to_none=set_to_none)
        for _, param in iter_slots(self.param_groups):
            if getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad = None  # type: ignore[attr-defined]

    # -- state ----------------------------------------------------------------------------------

    def slot_state(self, slot: Slot) -> dict[str, Any]:
        param = self.param_groups[slot.group]["params"][slot.position]
        if not self.has_state(slot):
            return {}
        state = dict(self.inner.slot_state(slot))
        if isinstance(param, DTensor):  # blocks are a shard's own: no other layout could read them
            full = self.inner.full_slot_state(slot)
            state = {key: full[key] if scale_key(key) in state else value for key, value in state.items()
                     if not key.endswith(scale_key(""))}
        if self._has_master(slot):
            state[MASTER] = self._main(slot)
        return {key: as_sharded(value, param) for key, value in state.items()}

    def full_slot_state(self, slot: Slot) -> dict[str, Any]:
        param = self.param_groups[slot.group]["params"][slot.position]
        if not self.has_state(slot):
            return {}
        state = self.inner.full_slot_state(slot)
        if self._has_master(slot):
            state[MASTER] = self._main(slot)
        return {key: as_sharded(value, param) for key, value in state.items()}

    def fit_slot_state(self, slot: Slot, state: dict[str, Any], convert: bool) -> dict[str, Any]:
        if not self.has_state(slot):
            return state
        state = as_local_state(state)
        if REMAINDER in state and self._has_master(slot):
            param = local_tensor(self.param_groups[slot.group]["params"][slot.position])
            state[MASTER] = joined(self.slot_name(slot), param, state.pop(REMAINDER))
        rest, master = self._split(slot, state)
        fit = self.inner.fit_slot_state(slot, rest, convert)
        return fit if master is None else {**fit, MASTER: master}

    def _split(self, slot: Slot, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        rest = as_local_state(state)
        return rest, rest.pop(MASTER, None) if self._has_master(slot) else None

    def check_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        if self._has_master(slot) and MASTER not in state:
            raise ValueError(f"state of {self.slot_name(slot)}: master_param is missing, so its full-precision value "
                             "is lost; to start from the model's values, add them to the state dict under that key")
        rest, master = self._split(slot, state)
        if master is not None and master.shape != self._main(slot).shape:
            raise ValueError(f"{self.slot_name(slot)}.master_param: saved shape {tuple(master.shape)}, expected "
                             f"{tuple(self._main(slot).shape)}")
        self.inner.check_slot_state(slot, rest)

    def load_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        rest, master = self._split(slot, state)
        self.inner.load_slot_state(slot, rest)
        if master is not None:
            self._main(slot).copy_(master)

    def state_dict(self, is_loading: bool = False, *, full_precision: bool = False) -> dict[str, Any]:
        """Torch-shaped, plus ``grad_scaler`` if there is one. ``is_loading`` is accepted and not needed."""
        state_dict = super().state_dict(full_precision=full_precision)
        if self.grad_scaler is not None:
            state_dict["grad_scaler"] = self.grad_scaler.state_dict()
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, convert: bool = False) -> None:
        self._sync()
        super().load_state_dict(state_dict, convert=convert)
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    def _accelerator_tensors(self) -> Iterator[Tensor]:
        for slot in filter(self.has_state, self.slots()):
            tensors = list(self.inner.slot_state(slot).values())
            if self.has_separate_main(slot):
                tensors.append(self._main(slot))
            yield from (t for t in tensors if isinstance(t, Tensor) and t.device.type != "cpu")

    def offload_to_cpu(self) -> None:
        """Move main params and moments off the accelerator; gradients are the caller's to clear."""
        self.discard_early_work()
        self._parking.park(self._accelerator_tensors())

    def restore_from_cpu(self) -> None:
        """Undo :meth:`offload_to_cpu`; what is stepped on the host stays there."""
        self._parking.restore()

    # -- what is going on -----------------------------------------------------------------------

    @property
    def is_stub_optimizer(self) -> bool:
        """Whether there is nothing to step on this rank."""
        return not any(group["params"] for group in self.param_groups)

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        """The parts; an optimizer without parts is its own only part."""
        return [self]

    def get_parameters(self) -> list[Tensor]:
        """The model's parameters in slot order."""
        return self._params()

    def describe(self) -> Description:
        """Per group, place and dtype: count, bytes, backend and why; ``print`` it."""
        return describe(self)

    def metrics(self) -> dict[str, float]:
        """Numbers about the last step and the run so far."""
        traffic = getattr(self.inner, "traffic", None)
        norms = {f"grad_norm/{name}": norm for name, norm in self._verdict.norms.items() if name != EXCLUDED}
        return {
            "grad_norm": float("nan") if self._verdict.grad_norm is None else self._verdict.grad_norm,
            "loss_scale": float(self.get_loss_scale()),
            "multiplier": self._verdict.multipliers.get(MAIN, 0.0),
            "bytes_down": 0 if traffic is None else traffic.down,
            "bytes_up": 0 if traffic is None else traffic.up,
            **getattr(self.inner, "host_metrics", dict)(),
            **norms,
            **self._counts,
        }
