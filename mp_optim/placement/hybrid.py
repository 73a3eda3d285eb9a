"""HybridDeviceOptimizer: one optimizer, part of whose parameters are stepped on the host.

Keyed by position. Tensors in ``param_groups`` may be replaced at any time: before each step the
sub-optimizers are handed whatever sits at each slot now.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.layouts import layout_of
from mp_optim.placement.arena import HostArena, aligned_bytes
from mp_optim.placement.arrivals import Arrivals, final_in_backward
from mp_optim.placement.cores import occupy, worker_threads
from mp_optim.placement.pipeline import HostPipeline, Traffic, staging_bytes
from mp_optim.placement.plan import plan_offload
from mp_optim.placement.schedule import HostSchedule, OffloadMode
from mp_optim.placement.stages import Stages
from mp_optim.placement.transfer import Transfer, transfer_for
from mp_optim.slot_optimizer import Closure, SlotOptimizer
from mp_optim.slots import Slot, SlotUpdate, current_grad, follow, iter_slots, local_tensor, same_memory, stream_of
from mp_optim.update import FusedAdam, RuleOptimizer, as_slot_optimizer, global_grad_norm

__all__ = ["HybridDeviceOptimizer"]

Place = Literal["device", "host"]
_NOT_PUSHED = ("params", "param_names", "fqns")


@dataclass
class _Seat:
    """Where one slot is stepped.

    Attributes:
        place: on the device of its parameter, or on the host.
        index: position in the same group of that place's sub-optimizer.
        share: elements a rank holds of it, rounded up: the same number on every rank.
        main: the copy that is stepped, if it is not the parameter itself.
        resident: the tensor in ``param_groups`` is itself the one to step.
        bound: the tensor seen in ``param_groups`` at the last step.
    """

    place: Place
    index: int
    share: int
    resident: bool
    main: Tensor | None = None
    bound: Tensor | None = None


class HybridDeviceOptimizer(SlotOptimizer):
    """Steps a fraction of its parameters on the host, the rest where they lie.

    Args:
        params: parameters, named parameters or param groups, as torch takes them.
        offload_fraction: share of elements stepped on the host (see :func:`plan_offload`).
        cpu_optimizer_cls, gpu_optimizer_cls: any torch optimizer classes; ours step in one pass.
        param_update_in_fp32: step 16-bit parameters through FP32 copies kept here (always done for
            this package's own optimizers, which only step FP32).
        pin_cpu_grads, pin_cpu_params: page-lock host staging and host parameters, if an accelerator is used.
        overlap_cpu_optimizer_d2h_h2d: overlap copies in both directions with the host's arithmetic.
        offload_mode: ``sync``: the host computes in ``step``. ``overlap``: gradients come down and are measured during
            backward. ``speculative``: they are also stepped, into a second half of main params and moments.
        host_threads, host_cores: of the thread that works during backward; by default it leaves some to others.
        transfer: how tensors travel; by default what the parameters' device needs.
        bucket_bytes: staging memory per bucket.
        sub_optimizer_kwargs: constructor arguments of both classes that are not hyperparameters.
        **kwargs: hyperparameters for both optimizer classes.

    Raises:
        ValueError: for a fraction outside [0, 1], parameters on several accelerators, or ``speculative`` with a rule
            that cannot be carried out apart from its step.
    """

    def __init__(self, params: Iterable[Any], offload_fraction: float = 0.5,
                 cpu_optimizer_cls: type[torch.optim.Optimizer] = FusedAdam,
                 gpu_optimizer_cls: type[torch.optim.Optimizer] = FusedAdam,
                 param_update_in_fp32: bool = False, pin_cpu_grads: bool = True, pin_cpu_params: bool = True,
                 overlap_cpu_optimizer_d2h_h2d: bool = True, *, offload_mode: str = "sync",
                 host_threads: int | None = None, host_cores: Sequence[int] | None = None,
                 transfer: Transfer | None = None, bucket_bytes: int = 64 << 20,
                 sub_optimizer_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.offload_fraction = offload_fraction
        self._classes: dict[Place, type[torch.optim.Optimizer]] = {
            "device": gpu_optimizer_cls, "host": cpu_optimizer_cls}
        self._fp32 = param_update_in_fp32 or any(issubclass(c, SlotOptimizer) for c in self._classes.values())
        self._pin_params = pin_cpu_params
        self._kwargs = {**kwargs, **(sub_optimizer_kwargs or {})}
        self._remainders = bool(self._kwargs.get("store_param_remainders", False))
        self._seats: list[list[_Seat]] = []
        self._subs: dict[Place, SlotOptimizer] = {}
        super().__init__(params, dict(kwargs))
        device = self._only_accelerator()
        self._pin = device.type != "cpu" and device.type != "meta"
        self._transfer = transfer if transfer is not None else transfer_for(device)
        self.stages = Stages()
        self._pipeline = HostPipeline(self._transfer, bucket_bytes=bucket_bytes, pin=pin_cpu_grads and self._pin,
                                      depth=3 if overlap_cpu_optimizer_d2h_h2d else 1, stages=self.stages)
        self._seat_groups(self.param_groups)
        self._arena = HostArena(self._transfer, self._host_bytes(), pin_cpu_params and self._pin)
        self._subs = {place: self._build(place) for place in self._classes}
        self._adopt_defaults()
        self._arrivals = Arrivals(self._arrived)
        self._watched: list[tuple[Slot, Tensor]] = []
        self.schedule: HostSchedule | None = None
        if offload_mode != "sync":
            self.schedule = HostSchedule(
                self._subs["host"], self._host_slots(), self._transfer, mode=self._check_mode(offload_mode),
                stages=self.stages, bucket_bytes=bucket_bytes, pin_staging=pin_cpu_grads and self._pin,
                pin_mains=pin_cpu_params and self._pin, pipelined=overlap_cpu_optimizer_d2h_h2d,
                open_round=self._bind, set_up=partial(occupy, worker_threads(host_threads), host_cores))
        self._watch()

    # -- placement ------------------------------------------------------------------------------

    def _only_accelerator(self) -> torch.device:
        devices = {str(local_tensor(p).device) for _, p in iter_slots(self.param_groups)}
        found = sorted(devices - {"cpu", "meta"})
        if len(found) > 1:
            raise ValueError(f"parameters lie on several accelerators {found}; build one optimizer per device")
        return torch.device(found[0] if found else "meta" if devices == {"meta"} else "cpu")

    def _seat_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Plan the places of new groups, together, and give each slot its seat."""
        shares = [_share(p) for group in groups for p in group["params"]]
        trainable = [p.requires_grad for group in groups for p in group["params"]]
        hosted = plan_offload([size if trains else 0 for size, trains in zip(shares, trainable, strict=True)],
                              self.offload_fraction)
        running = 0
        for group in groups:
            counts: dict[Place, int] = {"device": 0, "host": 0}
            seats = []
            for param in group["params"]:
                place: Place = "host" if running in hosted else "device"
                resident = place == "device" and self._stepped_dtype(param.dtype) == param.dtype
                seats.append(_Seat(place, counts[place], shares[running], resident))
                counts[place] += 1
                running += 1
            self._seats.append(seats)

    def _host_bytes(self) -> int:
        return sum(aligned_bytes(local_tensor(p).numel(), self.main_dtype(p.dtype))
                   for slot, p in iter_slots(self.param_groups) if self._seat(slot).place == "host")

    def _seat(self, slot: Slot) -> _Seat:
        return self._seats[slot.group][slot.position]

    def place(self, slot: Slot) -> Place:
        """Where a slot is stepped."""
        return self._seat(slot).place

    def _host_slots(self) -> list[tuple[Slot, int]]:
        """Slots of the host's optimizer and the elements of each, in the order in which backward is expected to reach
        them: the last first."""
        found = [(Slot(slot.group, seat.index), seat.share) for slot, _ in iter_slots(self.param_groups)
                 if (seat := self._seat(slot)).place == "host"]
        return found[::-1]

    def _check_mode(self, mode: str) -> OffloadMode:
        if mode not in ("overlap", "speculative"):
            raise ValueError(f"offload_mode={mode!r}: must be one of ['sync', 'overlap', 'speculative']")
        host = self._subs["host"]
        if mode == "speculative" and not isinstance(host, RuleOptimizer):
            raise ValueError(f"offload_mode='speculative': {self._classes['host'].__name__} cannot step into other "
                             "memory than it steps from; use one of this package's optimizers, or 'overlap'")
        split = any(_is_split(p) for _, p in iter_slots(self.param_groups))
        if mode == "speculative" and isinstance(host, RuleOptimizer) and host.reduces_over_shards and split:
            raise ValueError(f"offload_mode='speculative': {host.rule} steps a split parameter by a collective, which "
                             "may not meet those of backward; use 'overlap'")
        return "overlap" if mode == "overlap" else "speculative"

    # -- sub-optimizers -------------------------------------------------------------------------

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """The device's optimizer, then the host's, as their classes built them."""
        return [getattr(sub, "optimizer", sub) for sub in self._subs.values()]

    def sub_optimizer(self, place: Place) -> SlotOptimizer:
        """The optimizer that steps a place, in slot terms."""
        return self._subs[place]

    def _sub_group(self, index: int, place: Place) -> dict[str, Any]:
        group = self.param_groups[index]
        here = [self._seats[index][i].place == place for i in range(len(group["params"]))]
        names = group.get("param_names")
        sub = {key: value for key, value in group.items() if key not in _NOT_PUSHED}
        sub["params"] = [local_tensor(p) for p, mine in zip(group["params"], here, strict=True) if mine]
        if names:
            sub["fqns"] = [name for name, mine in zip(names, here, strict=True) if mine]
        return sub

    def _build(self, place: Place) -> SlotOptimizer:
        groups = [self._sub_group(index, place) for index in range(len(self.param_groups))]
        return as_slot_optimizer(self._classes[place](groups, **self._kwargs))

    def _adopt_defaults(self) -> None:
        """Show the hyperparameters the sub-optimizers filled in, so that they can be changed here.

        Raises:
            ValueError: the two classes' defaults differ, so that a parameter's rule would depend on its place.
        """
        filled = [{k: v for k, v in sub.param_groups[-1].items() if k not in (*_NOT_PUSHED, *self.param_groups[-1])}
                  for sub in self._subs.values()]
        for key in filled[0].keys() & filled[1].keys():
            if filled[0][key] != filled[1][key]:
                raise ValueError(f"{key} is {filled[0][key]!r} by default on the device and {filled[1][key]!r} on the "
                                 f"host; pass {key}=")
        for sub in self._subs.values():
            for mine, theirs in zip(self.param_groups, sub.param_groups, strict=True):
                for key, value in theirs.items():
                    if key not in _NOT_PUSHED:
                        mine.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are placed on their own, by the same fraction and policy."""
        super().add_param_group(param_group)
        if not self._subs:  # torch's constructor is adding the first groups; they are planned together
            return
        index = len(self.param_groups) - 1
        self._seat_groups([self.param_groups[index]])
        for place, sub in self._subs.items():
            sub.add_param_group(self._sub_group(index, place))
        self._adopt_defaults()
        if self.schedule is not None:
            self.schedule.plan(self._host_slots())
        self._watch()

    # -- main params ----------------------------------------------------------------------------

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._remainders and dtype == torch.bfloat16 else torch.float32

    def _stepped_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype that a parameter of a dtype is stepped in if no wrapper asked for a main param."""
        return self.main_dtype(dtype) if self._fp32 and dtype in (torch.float16, torch.bfloat16) else dtype

    def main_param(self, slot: Slot) -> Tensor:
        sub, theirs = self._in_sub(slot)
        return sub.main_param(theirs)

    def set_main_param(self, slot: Slot, value: Tensor) -> None:
        sub, theirs = self._in_sub(slot)
        sub.set_main_param(theirs, value)

    def written_outside(self, slot: Slot) -> None:
        sub, theirs = self._in_sub(slot)
        sub.written_outside(theirs)

    def reserve_main_params(self, coming: Sequence[tuple[Slot, Tensor]]) -> None:
        super().reserve_main_params([(slot, source) for slot, source in coming if self._seat(slot).place == "device"])

    def new_main_param(self, slot: Slot, source: Tensor) -> Tensor:
        """Main param, born where it is stepped: on the host it never exists in FP32 on the device."""
        seat = self._seat(slot)
        seat.resident, seat.main = True, None
        if seat.place == "device":
            return super().new_main_param(slot, source)
        main = self._on_host(source, self.main_dtype(source.dtype))
        self.param_groups[slot.group]["params"][slot.position] = main
        return main

    def _on_host(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        host = self._arena.take(source.shape, dtype)
        return host.copy_(source)

    def _new_copy(self, seat: _Seat, param: Tensor) -> Tensor:
        dtype = self._stepped_dtype(param.dtype)
        return self._on_host(param, dtype) if seat.place == "host" else param.to(dtype)

    def _stepped(self, slot: Slot) -> Tensor:
        """The tensor to step for a slot, following whatever sits in ``param_groups`` now."""
        seat = self._seat(slot)
        param: Tensor = self.param_groups[slot.group]["params"][slot.position]
        if seat.resident:
            return param if type(param) is Tensor and not param.requires_grad else local_tensor(param)
        local = local_tensor(param)
        if seat.main is None:
            seat.main = self._new_copy(seat, local)
        elif param is not seat.bound:
            follow(seat.main, local, self.slot_name(slot))
            self._subs[seat.place].written_outside(Slot(slot.group, seat.index))
        seat.bound = param
        return seat.main

    def _bind(self) -> None:
        """Hand current tensors and hyperparameters to the sub-optimizers."""
        for index, group in enumerate(self.param_groups):
            settings = {key: value for key, value in group.items() if key not in _NOT_PUSHED}
            for sub in self._subs.values():
                sub.param_groups[index].update(settings)
            for position, seat in enumerate(self._seats[index]):
                seats = self._subs[seat.place].param_groups[index]["params"]
                stepped = self._stepped(Slot(index, position))
                if seats[seat.index] is not stepped and not same_memory(seats[seat.index], stepped):
                    seats[seat.index] = stepped

    def reload_model_params(self) -> None:
        """Take the parameters' present values into the copies kept here."""
        for slot, param in iter_slots(self.param_groups):
            if self._seat(slot).main is not None or param.dtype != torch.float32:
                self.set_main_param(slot, local_tensor(param))

    # -- stepping -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Step from the parameters' own gradients, as any torch optimizer does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [SlotUpdate(slot, local_tensor(grad), stream=stream_of(self.slot_name(slot)),
                              layout=layout_of(param))
                   for slot, param in iter_slots(self.param_groups)
                   if (grad := current_grad(param)) is not None]
        clips = any(group.get("max_grad_norm", 0.0) for group in self.param_groups)
        self.step_slots(updates, grad_norm=global_grad_norm([u.grad for u in updates]) if clips else None)
        return loss

    @torch.no_grad()
    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        self._watch()
        self._bind()
        routed: dict[Place, list[SlotUpdate]] = {"device": [], "host": []}
        for update in updates:
            routed[self._seat(update.slot).place].append(self._routed(update))

        def step_device() -> None:
            if routed["device"]:
                self._subs["device"].step_slots(routed["device"], grad_norm=grad_norm)

        if self.schedule is not None:
            self.schedule.step(routed["host"], grad_norm, step_device)
            return
        step_device()
        shares = [self._seat(update.slot).share for update in updates if self._seat(update.slot).place == "host"]
        self.stages.begin_step()
        self._pipeline.run(routed["host"], shares,
                           lambda bucket: self._subs["host"].step_slots(bucket, grad_norm=grad_norm))
        self.stages.end_step()

    def _routed(self, update: SlotUpdate) -> SlotUpdate:
        """An update in terms of the sub-optimizer that steps the slot."""
        seat, output = self._seat(update.slot), update.output
        if not seat.resident:
            output = local_tensor(self.param_groups[update.slot.group]["params"][update.slot.position])
        return update._replace(slot=Slot(update.slot.group, seat.index), output=output)

    # -- gradients that arrive during backward ----------------------------------------------------

    def arrived(self, update: SlotUpdate) -> None:
        """A gradient is complete, and what is done with it may begin. ``step_slots`` will be given the same update.

        Nothing depends on this being called: what was not begun, or with other values, is done in ``step_slots``.
        """
        if self.schedule is not None and self._seat(update.slot).place == "host":
            self.schedule.arrived(self._routed(update))

    def _watch(self) -> None:
        """Notice gradients of the parameters held here; main params of a wrapper have none."""
        if self.schedule is not None:
            self._watched = list(iter_slots(self.param_groups))
            self._arrivals.follow([param for _, param in self._watched],
                                  [self._seat(slot).place == "host" for slot, _ in self._watched])

    def _arrived(self, index: int) -> None:
        slot, param = self._watched[index]
        grad = current_grad(param)
        if grad is not None and final_in_backward(param):
            self.arrived(SlotUpdate(slot, local_tensor(grad), stream=stream_of(self.slot_name(slot))))

    def use_transfer(self, transfer: Transfer) -> None:
        """Have tensors travel another way from now on; nothing may be on its way."""
        self._transfer = transfer
        self._pipeline = self._pipeline.over(transfer)
        if self.schedule is not None:
            self.schedule.transfer = transfer
            self.schedule.plan(self._host_slots())

    def memory_moved(self) -> None:
        for sub in self._subs.values():
            sub.memory_moved()

    def verdict_device(self) -> torch.device | None:
        hosted = any(seat.place == "host" for seats in self._seats for seat in seats)
        return None if hosted else self._subs["device"].verdict_device()

    @property
    def traffic(self) -> Traffic:
        """Bytes the last step moved between the places."""
        return self._pipeline.traffic if self.schedule is None else self.schedule.traffic

    @property
    def staging_bytes(self) -> int:
        """Host bytes held for transfers."""
        return self._pipeline.staging_bytes if self.schedule is None else self.schedule.staging_bytes

    def host_notes(self) -> tuple[str, ...]:
        """How the host's part is stepped during backward, in words."""
        if self.schedule is None:
            return ()
        return (f"host: offload_mode {self.schedule.mode}, {self.schedule.buckets} buckets, "
                f"{self.double_buffer_bytes():,} bytes double buffer",)

    def host_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Main params (under an empty name) and state that are stepped on the host, but for step counters."""
        self._bind()
        host = self._subs["host"]
        for slot, _ in iter_slots(host.param_groups):
            yield "", host.param_groups[slot.group]["params"][slot.position]
            yield from ((key, value) for key, value in host.slot_state(slot).items() if key != "step")

    def double_buffer_bytes(self) -> int:
        """Bytes of the other halves, which are allocated when they are first stepped into."""
        if self.schedule is None or self.schedule.mode != "speculative":
            return 0
        return sum(aligned_bytes(tensor.numel(), tensor.dtype) for _, tensor in self.host_tensors())

    def staging_for(self, params: Sequence[Tensor]) -> int:
        """Bytes of staging that stepping takes.

        Args:
            params: the model's, in slot order; gradients are taken to have their dtypes.
        """
        updates, shares = [], []
        for (slot, _), param in zip(iter_slots(self.param_groups), params, strict=True):
            if self._seat(slot).place == "host" and param.requires_grad:
                local = local_tensor(param)
                updates.append(SlotUpdate(slot, local, output=local))
                shares.append(self._seat(slot).share)
        if self.schedule is not None:
            return sum(map(staging_bytes, updates))
        return self._pipeline.staging_for(updates, shares)

    def host_metrics(self) -> dict[str, float]:
        """Milliseconds of the last step's stages on the host, and how speculation did so far."""
        return {**self.stages.metrics(), **({} if self.schedule is None else self.schedule.counts)}

    # -- state ----------------------------------------------------------------------------------

    def _in_sub(self, slot: Slot) -> tuple[SlotOptimizer, Slot]:
        seat = self._seat(slot)
        sub = self._subs[seat.place]
        sub.param_groups[slot.group]["params"][seat.index] = self._stepped(slot)
        theirs = Slot(slot.group, seat.index)
        if self.schedule is not None and seat.place == "host":
            self.schedule.touched(theirs)
        return sub, theirs

    def _own_master(self, slot: Slot) -> Tensor | None:
        """The copy, if it says more than the parameter does."""
        main = self._seat(slot).main
        param = self.param_groups[slot.group]["params"][slot.position]
        return main if main is not None and main.dtype != param.dtype else None

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        for place, sub in self._subs.items():
            mine = [slot for slot in slots if self._seat(slot).place == place]
            sub.allocate_state([self._in_sub(slot)[1] for slot in mine])

    def slot_state(self, slot: Slot) -> dict[str, Any]:
        sub, theirs = self._in_sub(slot)
        master = self._own_master(slot)
        state = sub.slot_state(theirs)
        return state if master is None else {**state, "master_param": master}

    def full_slot_state(self, slot: Slot) -> dict[str, Any]:
        sub, theirs = self._in_sub(slot)
        master = self._own_master(slot)
        state = sub.full_slot_state(theirs)
        return state if master is None else {**state, "master_param": master}

    def fit_slot_state(self, slot: Slot, state: dict[str, Any], convert: bool) -> dict[str, Any]:
        sub, theirs = self._in_sub(slot)
        rest, master = self._split(slot, state)
        fit = sub.fit_slot_state(theirs, rest, convert)
        return fit if master is None else {**fit, "master_param": master}

    def _split(self, slot: Slot, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        rest = dict(state)
        master = rest.pop("master_param", None) if self._own_master(slot) is not None else None
        return rest, master

    def check_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        sub, theirs = self._in_sub(slot)
        rest, master = self._split(slot, state)
        if (own := self._own_master(slot)) is not None and master is None:
            raise ValueError(f"state of {self.slot_name(slot)}: master_param ({own.dtype}) is missing")
        sub.check_slot_state(theirs, rest)

    def load_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        sub, theirs = self._in_sub(slot)
        rest, master = self._split(slot, state)
        sub.load_slot_state(theirs, rest)
        if (own := self._own_master(slot)) is not None and master is not None:
            own.copy_(local_tensor(master))


def _is_split(param: Tensor) -> bool:
    """Whether ranks hold different parts of a parameter."""
    return isinstance(param, DTensor) and any(placement.is_shard() for placement in param.placements)


def _share(param: Tensor) -> int:
    """Elements of a parameter per rank that holds a part of it. Unlike the local size, no two ranks differ in it."""
    if not isinstance(param, DTensor):
        return int(getattr(param, "offload_share", param.numel()))
    ranks = math.prod(param.device_mesh.size(dim) for dim, p in enumerate(param.placements) if p.is_shard())
    return math.ceil(param.numel() / ranks)
