"""Notices that a parameter's gradient is there, and tells whether a gradient is still the one that
was there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

__all__ = ["GradHooks", "GradVersion", "final_in_backward"]


@dataclass(frozen=True, slots=True)
class GradVersion:
    """A gradient at one moment, without keeping it alive.

    Attributes:
        storage: its memory, as long as that exists; another gradient at the same address has
            another storage.
        address: where it begins.
        version: how often it was written; None if nobody counts, as of tensors made in inference
            mode.
        arrivals: how often a gradient had arrived at the slot.
    """

    storage: StorageWeakRef
    address: int
    version: int | None
    arrivals: int

    @classmethod
    def of(cls, grad: Tensor, arrivals: int) -> GradVersion:
        """The stamp of a plain tensor."""
        storage = StorageWeakRef(grad.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(storage, grad.data_ptr(), _version_of(grad), arrivals)

    def matches(self, grad: Tensor, arrivals: int) -> bool:
        """Whether this is the same gradient, and nobody wrote to it since (``grad.data`` leaves no
        trace)."""
        same = (self.arrivals, self.version, self.address) == (
            arrivals,
            _version_of(grad),
            grad.data_ptr(),
        )
        gone = self.storage.expired()  # type: ignore[no-untyped-call]
        return (
            same
            and self.version is not None
            and not gone
            and self.storage.cdata == grad.untyped_storage()._cdata
        )


def _version_of(grad: Tensor) -> int | None:
    return None if grad.is_inference() else grad._version


class GradHooks:
    """Hooks on parameters that call ``arrived(index)`` when backward has added to a gradient.

    Neither the hooks nor this object keep the owner of ``arrived``, a bound method, alive.
    """

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived = weakref.WeakMethod(arrived)
        self._params: list[Tensor | None] = []
        self._handles: list[RemovableHandle | None] = []
        weakref.finalize(self, _remove, self._handles)

    def follow(self, params: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        """Have hooks on the wanted ones of these parameters, and on no others."""
        missing = len(params) - len(self._params)
        self._params += [None] * missing
        self._handles += [None] * missing
        for index, (param, want) in enumerate(zip(params, wanted, strict=True)):
            now = param if want and param.requires_grad and param.is_leaf else None
            if now is self._params[index]:
                continue
            if (handle := self._handles[index]) is not None:
                handle.remove()
                self._handles[index] = None
            if now is not None:
                hook = _hook(self._arrived, index)
                self._handles[index] = now.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._params[index] = now

    def close(self) -> None:
        """Remove all hooks."""
        _remove(self._handles)
        self._params = [None] * len(self._params)


def _hook(
    arrived: weakref.WeakMethod[Callable[[int], None]], index: int
) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        if (call := arrived()) is not None:
            call(index)

    return hook


def _remove(handles: list[RemovableHandle | None]) -> None:
    for index, handle in enumerate(handles):
        if handle is not None:
            handle.remove()
            handles[index] = None


def final_in_backward(param: Tensor) -> bool:
    """Whether what backward leaves in a parameter's gradient is what will be stepped.

    In a job of several ranks somebody may still have to reduce it: only FSDP2, whose meshes span
    the job, calls the hooks after that.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    return isinstance(param, DTensor) and param.device_mesh.size() == dist.get_world_size()
