"""RuleOptimizer: slots, state and batching for the rules this package steps itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.slot_optimizer import Closure, SlotOptimizer
from mp_optim.slots import (
    Slot,
    SlotUpdate,
    SlotUpdates,
    SteadyList,
    all_same,
    are_plain,
    current_grad,
    iter_slots,
    local_tensor,
)
from mp_optim.update.backends import Backend, choose_backend
from mp_optim.update.lists import TensorLists

__all__ = ["MOMENT_DTYPES", "RuleOptimizer", "check_adam_settings", "check_range", "global_grad_norm"]


MOMENT_DTYPES = (torch.float32, torch.bfloat16)


class _Launch(NamedTuple):
    """Updates of one group with equal keys go into one backend call."""

    device: torch.device
    step: float
    multiplier: float


class _GroupState:
    """State of one param group.

    Attributes:
        steps: FP32, shape (slots,), on the CPU: how often each slot was stepped. A slot's ``step`` is a view of it.
        slots: state tensors of each slot; empty until somebody looks.
        mains: the tensor each slot's state was last found to fit.
        steady_mains: all of them, if they are this package's own tensors and not a model's parameters, whose memory
            others may move (``param.data = ...``).
    """

    def __init__(self, count: int) -> None:
        self.steps = torch.zeros(count, dtype=torch.float32)
        self.slots: list[dict[str, Tensor]] = [{} for _ in range(count)]
        self.mains: list[Tensor | None] = [None] * count
        self.steady_mains: SteadyList | None = None
        self._whole: dict[str, SteadyList] = {}

    def is_whole(self, positions: Sequence[int]) -> bool:
        """Whether these are all positions, in order."""
        return len(positions) == len(self.slots) and positions == list(range(len(self.slots)))

    def tensors(self, name: str, positions: Sequence[int]) -> list[Tensor]:
        """State tensors of that name; the same list every time as long as all slots are asked for."""
        if not self.is_whole(positions):
            return [self.slots[position][name] for position in positions]
        if name not in self._whole:
            self._whole[name] = SteadyList(slot[name] for slot in self.slots).hold()
        return self._whole[name]

    def replaced(self) -> None:
        """Forget lists of tensors: one of them is another tensor now."""
        self._whole.clear()
        self.steady_mains = None

    def count(self, positions: Sequence[int]) -> None:
        """Add a step to the given slots."""
        if len(positions) == len(self.slots):
            self.steps += 1
        else:
            self.steps[torch.tensor(positions)] += 1


class RuleOptimizer(SlotOptimizer):
    """A rule over FP32 tensors. State per slot: ``step`` (0-d FP32 on the CPU) and the rule's moments.

    Args:
        backend: ``fused_backend`` of the config.
        dtypes: dtype of each moment by name, float32 or bfloat16; float32 where nothing is said.

    Raises:
        ValueError: a dtype that a moment cannot have.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], backend: str = "auto",
                 dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        choose_backend(backend, torch.device("cpu"))
        self._backend = backend
        self._dtypes = dict(dtypes or {})
        for name, dtype in self._dtypes.items():
            if dtype not in MOMENT_DTYPES or (backend == "torch" and dtype != torch.float32):
                raise ValueError(f"{name}_dtype={dtype}: moments are {MOMENT_DTYPES[0]} or {MOMENT_DTYPES[1]} (with "
                                 f"backend='torch' only the former); backend={backend!r}")
        self._groups: list[_GroupState] = []
        super().__init__(params, defaults)

    # -- what a rule provides -------------------------------------------------------------------

    @abstractmethod
    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the moments the rule keeps under a group's settings."""

    @abstractmethod
    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise ValueError naming the setting and its value if it is out of range."""

    @abstractmethod
    def apply(self, backend: Backend, lists: TensorLists, group: dict[str, Any], step: int, multiplier: float,
              updates: SlotUpdates) -> None:
        """Carry out the rule for tensors that share device, group, step and multiplier."""

    # -- state ----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ValueError: a setting is out of range, naming it.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_settings(group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._groups.append(_GroupState(len(group["params"])))

    def slot_state(self, slot: Slot) -> dict[str, Any]:
        own, group = self._groups[slot.group], self.param_groups[slot.group]
        state = own.slots[slot.position]
        tensor = group["params"][slot.position]
        main = local_tensor(tensor)
        if not state:
            state["step"] = own.steps[slot.position]
        for name in self.moments(group):
            if name not in state:
                dtype = self._dtypes.get(name, torch.float32)
                state[name] = torch.zeros(main.shape, dtype=dtype, device=main.device)
                own.replaced()
            elif state[name].shape != main.shape:
                raise ValueError(f"{self.slot_name(slot)}: the parameter's shape is now {tuple(main.shape)}, its "
                                 f"{name} has {tuple(state[name].shape)}; a replacement must keep the shape")
            elif state[name].device != main.device:
                state[name] = state[name].to(main.device)
                own.replaced()
        if own.mains[slot.position] is not tensor:
            own.mains[slot.position] = tensor
            own.steady_mains = None
        return state

    def load_slot_state(self, slot: Slot, state: dict[str, Any]) -> None:
        self.check_slot_state(slot, state)
        for key, own in self.slot_state(slot).items():
            own.copy_(torch.as_tensor(state[key]))

    # -- stepping -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Step every parameter that has a gradient; returns the closure's loss if one is given.

        Raises:
            TypeError: a parameter is not FP32, or a gradient is sparse or complex, naming it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = []
        for slot, param in iter_slots(self.param_groups):
            if (grad := current_grad(param)) is None:
                continue
            if grad.layout != torch.strided or not grad.is_floating_point():
                raise TypeError(f"{self.slot_name(slot)}: gradient is {grad.dtype}, layout {grad.layout}; dense "
                                "floating-point gradients are supported")
            updates.append(SlotUpdate(slot, local_tensor(grad)))
        clips = any(group.get("max_grad_norm", 0.0) for group in self.param_groups)
        self.step_slots(updates, grad_norm=global_grad_norm([u.grad for u in updates]) if clips else None)
        return loss

    @torch.no_grad()
    def step_slots(self, updates: Sequence[SlotUpdate], *, grad_norm: float | None = None) -> None:
        columns = SlotUpdates.of(updates)
        groups = [slot.group for slot in columns.slots]
        found = dict.fromkeys(groups)
        for index in found:
            part = columns if len(found) == 1 else columns.take([at for at, g in enumerate(groups) if g == index])
            self._step_group(index, part, grad_norm)

    def _step_group(self, index: int, updates: SlotUpdates, grad_norm: float | None) -> None:
        group, own = self.param_groups[index], self._groups[index]
        positions = [slot.position for slot in updates.slots]
        mains = self._mains(index, positions)
        steps = own.steps.tolist()
        multipliers = {value: self.effective_multiplier(group, value, grad_norm) for value in set(updates.multipliers)}
        counts = [steps[position] for position in positions]
        if len(mains.devices) == len(set(counts)) == len(multipliers) == 1:
            launch = _Launch(mains[0].device, counts[0], multipliers[updates.multipliers[0]])
            self._launch(index, launch, updates, positions, mains)
        else:
            keys = list(zip((main.device for main in mains), counts, updates.multipliers, strict=True))
            for key in dict.fromkeys(keys):
                members = [at for at, other in enumerate(keys) if other == key]
                self._launch(index, _Launch(key[0], key[1], multipliers[key[2]]), updates.take(members),
                             [positions[at] for at in members], SteadyList(mains[at] for at in members))
        own.count(positions)

    def backend_for(self, device: torch.device) -> tuple[Backend, str]:
        """What carries the rule out on a device, and why."""
        return choose_backend(self._backend, device)

    def effective_multiplier(self, group: dict[str, Any], multiplier: float, grad_norm: float | None) -> float:
        """The multiplier after the rule's own clipping, if it has one."""
        return multiplier

    def _mains(self, index: int, positions: Sequence[int]) -> SteadyList:
        """The plain FP32 tensors at some positions of a group, with state that fits them."""
        params, own = self.param_groups[index]["params"], self._groups[index]
        whole = own.is_whole(positions)
        tensors = list(params) if whole else [params[position] for position in positions]
        if all_same(tensors, own.mains if whole else [own.mains[position] for position in positions]):
            if whole and own.steady_mains is not None:
                return own.steady_mains
        else:
            for position in positions:
                self.slot_state(Slot(index, position))
        mains = SteadyList(tensors if are_plain(tensors) else map(local_tensor, tensors))
        if mains.dtypes - {torch.float32}:
            position, main = next((p, m) for p, m in zip(positions, mains, strict=True) if m.dtype != torch.float32)
            raise TypeError(f"{self.slot_name(Slot(index, position))} is {main.dtype}: {type(self).__name__} steps "
                            "float32; wrap it in Float16OptimizerWithFloat16Params, or use get_megatron_optimizer")
        if whole and set(map(type, tensors)) == {Tensor}:
            own.steady_mains = mains.hold()
        return mains

    def _launch(self, index: int, launch: _Launch, updates: SlotUpdates, positions: Sequence[int],
                mains: SteadyList) -> None:
        group, own = self.param_groups[index], self._groups[index]
        outputs = list(updates.outputs)
        lists = TensorLists(
            main=_contiguous(mains), grad=_contiguous(SteadyList.of(updates.grads)),
            state={name: own.tensors(name, positions) for name in self.moments(group)},
            output=_contiguous_outputs(outputs))
        backend, _ = self.backend_for(launch.device)
        self.apply(backend, lists, group, int(launch.step) + 1, launch.multiplier, updates)
        for mine, stepped in ((mains, lists.main), (outputs, lists.output)):
            if mine is not stepped:
                _copy_back(mine, stepped)


def _contiguous(tensors: SteadyList) -> SteadyList:
    """The list itself if every tensor in it is contiguous, else one that is."""
    return tensors if tensors.contiguous else SteadyList(tensor.contiguous() for tensor in tensors)


def _contiguous_outputs(outputs: list[Tensor | None]) -> list[Tensor | None]:
    """The list itself if every tensor in it is contiguous, else one with memory of its own for those that are not."""
    if all(map(Tensor.is_contiguous, [output for output in outputs if output is not None])):
        return outputs
    return [output if output is None or output.is_contiguous()
            else torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]


def _copy_back(tensors: Sequence[Tensor | None], written: Sequence[Tensor | None]) -> None:
    for tensor, copy in zip(tensors, written, strict=True):
        if tensor is not None and copy is not None and tensor is not copy:
            tensor.copy_(copy)


def global_grad_norm(grads: Sequence[Tensor]) -> float:
    """L2 norm over gradients that may lie on several devices, in FP64."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_device[grad.device].append(grad)
    sums = [choose_backend("auto", device)[0].sum_of_squares(found) for device, found in by_device.items()]
    return math.sqrt(sum(float(part.sum()) for part in sums))


def check_range(group: dict[str, Any], name: str, good: bool, rule: str) -> None:
    """Raise ValueError naming the setting unless ``good``."""
    if not good:
        raise ValueError(f"{name}={group[name]!r}: must be {rule}")


def check_adam_settings(group: dict[str, Any]) -> None:
    """The settings Adam and LAMB share."""
    check_range(group, "lr", float(group["lr"]) >= 0.0, ">= 0")
    check_range(group, "betas", len(group["betas"]) == 2 and all(0.0 <= float(b) < 1.0 for b in group["betas"]),
                "two numbers in [0, 1)")
    check_range(group, "eps", group["eps"] >= 0.0, ">= 0")
    check_range(group, "weight_decay", group["weight_decay"] >= 0.0, ">= 0")
