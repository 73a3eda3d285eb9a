"""Notices that a parameter's gradient is ready, for what works during backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mp_optim.core import (
    ParamGroups,
    Slot,
    SlotUpdates,
    are_plain,
    current_grad,
    iter_slots,
    local_grad,
    local_tensor,
    param_at,
    slot_name,
    update_of,
)
from mp_optim.core.executor import Place
from mp_optim.host.torch_types import is_dtensor


class GradHooks:
    """Hooks on parameters that call ``on_grad(index)`` when backward has made a gradient final.

    Neither the hooks nor this object keep the owner of ``on_grad``, a bound method, alive.
    """

    def __init__(self, on_grad: Callable[[int], None]) -> None:
        self._on_grad = weakref.WeakMethod(on_grad)
        self._params: list[Tensor | None] = []
        self._handles: list[RemovableHandle | None] = []
        weakref.finalize(self, _remove, self._handles)

    def follow(self, params: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        """Have hooks on the wanted ones of these parameters, and on no others."""
        missing = len(params) - len(self._params)
        self._params += [None] * missing
        self._handles += [None] * missing
        if missing < 0:
            _remove(self._handles[missing:])
            del self._params[missing:], self._handles[missing:]
        for index, (param, want) in enumerate(zip(params, wanted, strict=True)):
            now = param if want and param.requires_grad and param.is_leaf else None
            if now is self._params[index]:
                continue
            if (handle := self._handles[index]) is not None:
                handle.remove()
                self._handles[index] = None
            if now is not None:
                hook = _hook(self._on_grad, index)
                self._handles[index] = now.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._params[index] = now


def _hook(
    on_grad: weakref.WeakMethod[Callable[[int], None]], index: int
) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        if (call := on_grad()) is not None and _is_final(param):
            call(index)

    return hook


def _remove(handles: list[RemovableHandle | None]) -> None:
    for index, handle in enumerate(handles):
        if handle is not None:
            handle.remove()
            handles[index] = None


def _is_final(param: Tensor) -> bool:
    """Whether what backward leaves in a parameter's gradient is what will be stepped.

    In a job of several ranks it may still have to be reduced: only FSDP2, whose meshes span the
    job, calls the hooks after that.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    return is_dtensor(param) and param.device_mesh.size() == dist.get_world_size()


class GradientSource(Protocol):
    """The layer that has the gradients.

    Attributes:
        fused_backend: by which they are measured.
    """

    fused_backend: str

    def share_settings(self) -> None:
        """Make settings here and of what steps the same; called before a step is begun early."""

    def updates(self, grads: Mapping[Slot, Tensor], multiplier: float) -> SlotUpdates:
        """The updates of some slots, as the step will be given them, in this order; without those
        whose parameters have another shape by now, which the step refuses."""

    def predicted_multiplier(self) -> float:
        """What gradients will be multiplied with, in FP32, if nothing is clipped or skipped."""


@dataclass(frozen=True)
class Claim:
    """A gradient that may be released: its parameter need not keep it once the host has it.

    Attributes:
        index: of the parameter. released: takes the gradient, by that index.
    """

    param: Tensor
    grad: Tensor
    index: int
    released: dict[int, Tensor]

    def release(self, held: Tensor) -> None:
        """Let go of it: from now on it is this tensor on the host, which its download may still be
        writing."""
        self.released[self.index] = held
        self.param.grad = None


class OwnGrads:
    """The gradients of an optimizer that nothing wraps, for what steps them on the host: a
    :class:`GradientSource`, with hooks on the parameters that are not
    stepped on the device.

    Args:
        param_groups: the optimizer's live groups.
        place_of: where a slot is stepped.
        on_grad_ready: is told of them. It must not keep this object alive.
        output: what receives a slot's stepped value, if that is not what is stepped.
        share_settings: see :class:`GradientSource`.
    """

    fused_backend = "auto"

    def __init__(
        self,
        param_groups: ParamGroups,
        place_of: Callable[[Slot], Place],
        on_grad_ready: Callable[..., object],
        output: Callable[[Slot, Tensor | None], Tensor | None],
        share_settings: Callable[[], None],
    ) -> None:
        self._param_groups, self._place_of = param_groups, place_of
        self._report, self._output = on_grad_ready, output
        self.share_settings = share_settings
        self._hooks = GradHooks(self._on_grad)
        self._watched: list[tuple[Slot, Tensor]] = []

    def follow(self) -> None:
        """Notice gradients of the parameters that the optimizer has now."""
        self._watched = list(iter_slots(self._param_groups))
        wanted = [self._place_of(slot) != "device" for slot, _ in self._watched]
        self._hooks.follow([param for _, param in self._watched], wanted)

    def _on_grad(self, index: int) -> None:
        slot, param = self._watched[index]
        grad = current_grad(param)
        if param_at(self._param_groups, slot) is not param:
            return  # a wrapper has put its main param there, and reports the gradients itself
        if grad is not None:
            self._report(slot, local_grad(param, grad), None, are_plain([grad]))

    def updates(self, grads: Mapping[Slot, Tensor], multiplier: float) -> SlotUpdates:
        """See :class:`GradientSource`."""
        groups, updates = self._param_groups, []
        for slot, grad in grads.items():
            param = param_at(groups, slot)
            if local_tensor(param).shape == grad.shape:
                update = update_of(slot, slot_name(groups, slot), param, grad)
                output = self._output(slot, None)
                updates.append(update._replace(multiplier=multiplier, output=output))
        return SlotUpdates.of(updates)

    def predicted_multiplier(self) -> float:
        """There is no loss scale."""
        return 1.0
