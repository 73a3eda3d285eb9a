"""Gradients as backward makes them final: hooks on the parameters of the optimizer that takes the
step. Each gradient is reported to the scheduler, which may begin work on it.

A gradient on an accelerator is the same if its memory, its version and the sums of its bits are the
same. The version alone misses writes through ``grad.data``, foreign kernels and torch's foreach
operations on a DTensor. Gradients in host memory are compared with the copies that the worker used,
bit by bit, at every step.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from mp_optim.core import (
    ParamGroups,
    Slot,
    SlotUpdates,
    all_params,
    all_same,
    current_grad,
    iter_slots,
    local_tensor,
)
from mp_optim.core.executor import Place
from mp_optim.core.tensors import GRADIENT_DTYPES
from mp_optim.host.calls import writes_counted
from mp_optim.host.leases import sums_of_bits
from mp_optim.host.torch_types import is_dtensor


class GradSource(NamedTuple):
    """The optimizer that takes the step, as far as work during backward needs it.

    Attributes:
        param_groups: live groups with the parameters that backward reaches.
        share_settings: makes settings of these groups and of the executors below equal.
        updates: takes gradients by slot and one FP32 multiplier; returns the updates as the step
            will have them, in this order, without slots that the step rebinds or refuses.
        fused_backend: backend that measures gradients.
    """

    param_groups: ParamGroups
    share_settings: Callable[[], object]
    updates: Callable[[Mapping[Slot, Tensor], float], SlotUpdates | None]
    fused_backend: str


@dataclass(frozen=True)
class ReleasableGrad:
    """A gradient that its parameter need not keep once the host has it."""

    param: Tensor
    grad: Tensor

    @property
    def is_present(self) -> bool:
        """Whether the parameter still has this gradient."""
        return self.param.grad is self.grad

    def release(self) -> None:
        """Remove the gradient from its parameter."""
        self.param.grad = None


@dataclass(frozen=True, slots=True)
class GradVersion:
    """A gradient at one moment, without keeping it alive.

    Attributes:
        storage: its memory, as long as that exists; another gradient at the same address has
            another storage.
        address: where it begins.
        version: number of writes that torch counted; None for tensors made in inference mode.
        count: how often a gradient of the slot had got ready.
        bits: sums of its bits (:func:`sums_of_bits`) as they were; None if they are not asked for.
    """

    storage: StorageWeakRef
    address: int
    version: int | None
    count: int
    bits: Tensor | None = None

    @classmethod
    def of(cls, grad: Tensor, count: int, with_bits: bool = False) -> GradVersion:
        """Return the version of a plain tensor; ``with_bits`` also detects writes that torch does
        not count."""
        storage = StorageWeakRef(grad.untyped_storage())  # type: ignore[no-untyped-call]
        bits = _bits_of(grad) if with_bits else None
        return cls(storage, grad.data_ptr(), writes_counted(grad), count, bits)

    def matches(self, grad: Tensor, count: int) -> bool:
        """True if this is the same gradient, not written to since."""
        return (
            self.count == count
            and self.version == writes_counted(grad)
            and self.is_memory_of(grad)
            and (self.bits is None or torch.equal(self.bits, _bits_of(grad)))
        )

    def is_memory_of(self, grad: Tensor) -> bool:
        """Whether a gradient begins where this one did, in the same memory."""
        is_gone = self.storage.expired()  # type: ignore[no-untyped-call]
        return (
            self.address == grad.data_ptr()
            and not is_gone
            and self.storage.cdata == grad.untyped_storage()._cdata
        )


@torch.no_grad()
def _bits_of(grad: Tensor) -> Tensor:
    flat = grad.detach().reshape(-1)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    return sums_of_bits(flat.view(torch.uint8))


class BackwardGrads:
    """Hooks on the parameters of a source that are not stepped on the device.

    Neither the hooks nor this object keep the receiver alive.

    Args:
        place_of: returns the place where a slot is stepped.
        receive: bound method that takes the slot, its local gradient, and the releasable gradient
            or None.

    Attributes:
        source: the outermost optimizer; a wrapper takes the place of the optimizer it wraps.
    """

    def __init__(
        self,
        source: GradSource,
        place_of: Callable[[Slot], Place],
        receive: Callable[[Slot, Tensor, ReleasableGrad | None], object],
    ) -> None:
        self.source = source
        self._place_of, self._receive = place_of, weakref.WeakMethod(receive)
        self._seen: list[Tensor] = []
        self._trains: list[bool] = []
        self._watched: dict[Slot, Tensor] = {}
        self._slot_of: dict[int, Slot] = {}  # keyed by the id of the watched parameter
        self._hooks: dict[Slot, RemovableHandle] = {}
        self._counts: Counter[Slot] = Counter()  # versions of arrived gradients
        self._compared: dict[Slot, bool] = {}
        weakref.finalize(self, _remove, self._hooks)

    def use_source(self, source: GradSource) -> None:
        """Report the gradients of this optimizer's parameters from now on."""
        self.source = source
        self.places_changed()

    def places_changed(self) -> None:
        """Have hooks where slots are not stepped on the device now."""
        self._seen = []
        self.update_hooks()

    def update_hooks(self) -> None:
        """Have hooks on the trainable parameters that the source has now, and on no others."""
        params = all_params(self.source.param_groups)
        trains = [param.requires_grad for param in params]
        if trains == self._trains and all_same(params, self._seen):
            return
        self._seen, self._trains = params, trains
        watched = {}
        for slot, param in iter_slots(self.source.param_groups):
            if self._place_of(slot) != "device":
                watched[slot] = param
        hooked = {slot: p for slot, p in watched.items() if p.requires_grad and p.is_leaf}
        for slot in list(self._hooks):
            if slot not in hooked or hooked[slot] is not self._watched[slot]:
                self._hooks.pop(slot).remove()
        for slot, param in hooked.items():
            if slot not in self._hooks:
                hook = _hook(weakref.WeakMethod(self._report), slot)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks[slot] = handle
        self._watched = watched
        self._slot_of = {id(param): slot for slot, param in watched.items()}

    def stop(self) -> None:
        """Have no hooks."""
        self._seen = []
        _remove(self._hooks)

    def ready(self, params: Sequence[Tensor] | None) -> None:
        """Report the gradients of these parameters, or of all, in slot order."""
        if params is None:
            slots = list(self._watched)
        else:  # the time depends only on the number of these parameters
            found = [self._slot_of[id(param)] for param in params if id(param) in self._slot_of]
            slots = sorted(found)
        for slot in slots:
            self._report(slot)

    def present(self, slot: Slot) -> Tensor | None:
        """Return the local gradient that the parameter at a slot has now, None if there is none or
        it still has to be redistributed."""
        param = self._watched.get(slot)
        grad = None if param is None else current_grad(param)
        if param is None or grad is None or not _is_laid_out_alike(param, grad):
            return None
        return local_tensor(grad)

    # -- whether gradients are those that a job was given ------------------------------------------

    def count(self, slot: Slot) -> None:
        """Count a gradient that arrived."""
        self._counts[slot] += 1

    def versions(self, updates: SlotUpdates, with_bits: bool = False) -> dict[Slot, GradVersion]:
        """Return the present versions of the gradients of updates; see :meth:`GradVersion.of`."""
        return {
            slot: GradVersion.of(grad, self._counts[slot], with_bits)
            for slot, grad in zip(updates.slots, updates.grads, strict=True)
        }

    def are_complete(self, given: Mapping[Slot, GradVersion], updates: SlotUpdates) -> bool:
        """True if a job was given a gradient of each of these slots, and none arrived since."""
        return tuple(given) == tuple(updates.slots) and all(
            version.count == self._counts[slot] for slot, version in given.items()
        )

    def are_same(
        self,
        given: Mapping[Slot, GradVersion],
        updates: SlotUpdates,
        staged: Sequence[Tensor] | None,
    ) -> bool:
        """True if a job was given these gradients, as they are now.

        Args:
            given: the versions that the job was given.
            updates: updates of the step.
            staged: copies of gradients that the host can read, which are compared bit by bit; None
                to compare versions.
        """
        copies = [None] * len(updates) if staged is None else staged
        rows = zip(updates.slots, updates.grads, copies, strict=True)
        return self.are_complete(given, updates) and all(
            given[slot].matches(grad, self._counts[slot])
            if copy is None
            else self._has_bits(slot, grad, copy)
            for slot, grad, copy in rows
        )

    def is_same(
        self, slot: Slot, version: GradVersion, grad: Tensor, staged: Tensor | None
    ) -> bool:
        """True if a gradient is the one that a job measured; see :meth:`are_same`."""
        count = self._counts[slot]
        if staged is None:
            return version.matches(grad, count)
        is_last = version.count == count and version.is_memory_of(grad)
        return is_last and self._has_bits(slot, grad, staged)

    def forget_comparisons(self) -> None:
        """Discard comparisons, because gradients may have been written since."""
        self._compared = {}

    def _has_bits(self, slot: Slot, grad: Tensor, staged: Tensor) -> bool:
        """True if a gradient has the bits of its copy. Each is compared once, because the step uses
        the measured gradients next."""
        if slot not in self._compared:
            self._compared[slot] = same_bits(grad, staged)
        return self._compared[slot]

    # -- hooks ------------------------------------------------------------------------------------

    def _report(self, slot: Slot) -> None:
        param, receive = self._watched[slot], self._receive()
        grad = current_grad(param)
        if grad is None or grad.layout != torch.strided or receive is None:
            return  # the step reports a gradient that it does not support
        groups = self.source.param_groups
        live = groups[slot.group]["params"] if slot.group < len(groups) else ()
        if not any(param is each for each in live[slot.position :][:1]):
            return  # the parameter was replaced
        releasable = ReleasableGrad(param, grad) if _can_be_released(param, grad) else None
        receive(slot, local_tensor(grad), releasable)


def _hook(report: weakref.WeakMethod[Callable[[Slot], None]], slot: Slot) -> Callable[..., None]:
    def hook(param: Tensor) -> None:
        if (call := report()) is not None and _is_final(param):
            call(slot)

    return hook


def _remove(hooks: dict[Slot, RemovableHandle]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


def _is_final(param: Tensor) -> bool:
    """True if the gradient in a parameter is final when backward's hook is called.

    In a job of several ranks a gradient may still have to be reduced. Only FSDP2, whose meshes span
    the job, calls the hooks after its reduction.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    return is_dtensor(param) and param.device_mesh.size() == dist.get_world_size()


def _can_be_released(param: Tensor, grad: Tensor) -> bool:
    """True if ``param.grad`` is this tensor, of a supported dtype and its parameter's layout."""
    is_read = grad.dtype in GRADIENT_DTYPES and not (grad.is_meta or grad.requires_grad)
    return param.grad is grad and is_read and _is_laid_out_alike(param, grad)


def _is_laid_out_alike(param: Tensor, grad: Tensor) -> bool:
    """Whether the local tensor of a gradient belongs to the local tensor of its parameter."""
    if is_dtensor(param) and is_dtensor(grad):
        return grad.placements == param.placements
    return not (is_dtensor(param) or is_dtensor(grad))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether host tensors have the same bits: -0.0 is not 0.0, and a NaN is itself."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    words = _words(one), _words(other)
    if words[0] is not None and words[1] is not None:
        return torch.equal(words[0], words[1])
    integers = _INTEGERS[one.dtype.itemsize]
    return torch.equal(one.detach().view(integers), other.detach().view(integers))


def _words(tensor: Tensor) -> Tensor | None:
    """Return the tensor's bytes as int64, which compare four times as fast as 16-bit elements; None
    if they are not whole words."""
    first = tensor.storage_offset() * tensor.dtype.itemsize
    if not tensor.is_contiguous() or first % 8 or tensor.nbytes % 8:
        return None
    return tensor.detach().view(-1).view(torch.int64)
