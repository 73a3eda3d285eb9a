"""Slots: a parameter's identity is its place in the param groups, never the tensor that sits there.

Wrappers replace tensors (a mixed-precision wrapper, FSDP2, tensor parallelism); the pair
``(group, position)`` outlives all of that. Everything in this package that has to be found again
later is found by slot.
"""

from __future__ import annotations

import operator
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from mp_optim.layouts import Layout, layout_of, shard_groups_of

__all__ = [
    "DeviceMultiplier",
    "Multiplier",
    "Slot",
    "SlotStateView",
    "SlotUpdate",
    "SlotUpdates",
    "SteadyList",
    "all_same",
    "are_plain",
    "current_grad",
    "follow",
    "have_grad_only",
    "iter_slots",
    "local_grad",
    "local_tensor",
    "same_memory",
    "slot_name",
    "stream_of",
    "update_of",
    "with_names",
]

ParamGroups = list[dict[str, Any]]


class Slot(NamedTuple):
    """The identity of a parameter: index of its param group, position inside that group."""

    group: int
    position: int


@dataclass(frozen=True, eq=False, slots=True)
class DeviceMultiplier:
    """What gradients are multiplied with, while only the device knows; each is equal to itself
    alone.

    Attributes:
        values: FP32, shape (2,), on the device: the multiplier, and a flag that is not 0 if nothing
            is to be written.
        skipped: the flag, for the host; waits for the device.
    """

    values: Tensor
    skipped: Callable[[], bool]


Multiplier = float | DeviceMultiplier


class SlotUpdate(NamedTuple):
    """One slot's share of an optimizer step.

    Attributes:
        slot: which parameter.
        grad: local gradient in any floating dtype, on the device where the slot is stepped (or,
            when handed to a placing optimizer, where the gradient lies).
        multiplier: what the gradient is multiplied with (inverse loss scale times clip
            coefficient), already rounded to FP32; or where the device keeps it, for backends that
            read it there.
        output: tensor that receives the updated parameter in its own dtype, or None if the stepped
            tensor is itself the model's parameter.
        shard_groups: process groups over which the parameter is split, for rules that need
            whole-parameter norms. Empty if the local tensor is the whole parameter.
        stream: 32 bits that tell the parameter's random numbers from others', wherever it is
            stepped; by default made of the slot's name. Above them, where the local tensor begins
            in the parameter, in elements.
        layout: where the model's own tensor lies and how it is split, for rules that need whole
            matrices. None if the stepped tensor is the whole parameter, on its device.
    """

    slot: Slot
    grad: Tensor
    multiplier: Multiplier = 1.0
    output: Tensor | None = None
    shard_groups: tuple[ProcessGroup, ...] = ()
    stream: int | None = None
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class SlotUpdates(Sequence[SlotUpdate]):
    """The updates of a step as parallel lists: with thousands of slots, one pass over a list is
    cheap and an object for each is not. The fields are those of :class:`SlotUpdate`, in the plural;
    ``layouts`` may be empty for none."""

    slots: Sequence[Slot]
    grads: Sequence[Tensor]
    multipliers: Sequence[Multiplier]
    outputs: Sequence[Tensor | None]
    shard_groups: Sequence[tuple[ProcessGroup, ...]]
    streams: Sequence[int | None]
    layouts: Sequence[Layout | None] = ()

    @classmethod
    def of(cls, updates: Sequence[SlotUpdate]) -> SlotUpdates:
        """The same updates in this form."""
        if isinstance(updates, SlotUpdates):
            return updates
        return cls(
            tuple(u.slot for u in updates),
            [u.grad for u in updates],
            [u.multiplier for u in updates],
            [u.output for u in updates],
            [u.shard_groups for u in updates],
            [u.stream for u in updates],
            [u.layout for u in updates],
        )

    def take(self, indices: Sequence[int]) -> SlotUpdates:
        """Some of the updates."""
        return SlotUpdates(
            tuple(self.slots[i] for i in indices),
            [self.grads[i] for i in indices],
            [self.multipliers[i] for i in indices],
            [self.outputs[i] for i in indices],
            [self.shard_groups[i] for i in indices],
            [self.streams[i] for i in indices],
            [self.layouts[i] for i in indices] if self.layouts else (),
        )

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, index: int) -> SlotUpdate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SlotUpdate]: ...
    def __getitem__(self, index: int | slice) -> SlotUpdate | Sequence[SlotUpdate]:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        return SlotUpdate(
            self.slots[index],
            self.grads[index],
            self.multipliers[index],
            self.outputs[index],
            self.shard_groups[index],
            self.streams[index],
            self.layouts[index] if self.layouts else None,
        )


class SteadyList(list[Tensor]):
    """Plain tensors whose memory stays where it is for as long as the list is used, so that each
    fact about them is looked up once.

    Attributes:
        addresses: ``data_ptr`` of each.
        sizes: ``numel`` of each.
        dtypes, devices: those that occur.
        contiguous: whether all are.
        held: memory kept for as long as the list is; see :meth:`hold`.
    """

    held: tuple[object, ...] = ()

    def gradients_of(self, params: SteadyList) -> SteadyList:
        """The same tensors, known to be what is in ``params``' ``grad``: torch allows only the
        shapes and devices of the parameters there."""
        self.__dict__.update(sizes=params.sizes, devices=params.devices)
        return self

    def hold(self) -> SteadyList:
        """Keep the present memory, for a list used over many steps: should somebody give one of the
        tensors other memory (``tensor.data = ...``), the addresses still lead somewhere."""
        self.held = tuple(tensor.untyped_storage() for tensor in self)
        return self

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> SteadyList:
        """The same tensors in this form."""
        return tensors if isinstance(tensors, SteadyList) else cls(tensors)

    @cached_property
    def addresses(self) -> array[int]:
        return array("Q", map(Tensor.data_ptr, self))

    @cached_property
    def sizes(self) -> array[int]:
        return array("q", map(Tensor.numel, self))

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        return {tensor.dtype for tensor in self}

    @cached_property
    def devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self}

    @cached_property
    def contiguous(self) -> bool:
        return all(map(Tensor.is_contiguous, self))

    @property
    def strided(self) -> bool:
        """Whether all are dense tensors with strides; one that is not has no answer to whether it
        is contiguous."""
        try:
            return self.contiguous or all(tensor.layout == torch.strided for tensor in self)
        except RuntimeError:
            return False


def iter_slots(param_groups: ParamGroups) -> Iterator[tuple[Slot, Tensor]]:
    """Every slot with the tensor that sits there now, in group order."""
    for index, group in enumerate(param_groups):
        for position, param in enumerate(group["params"]):
            yield Slot(index, position), param


def with_names(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group in the form torch takes names in: ``params`` as (name, tensor) pairs."""
    plain = {key: value for key, value in group.items() if key != "param_names"}
    names = group.get("param_names")
    plain["params"] = (
        list(group["params"]) if names is None else list(zip(names, group["params"], strict=True))
    )
    return plain


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors show the same elements in the same way."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.device == b.device
        and (a.device.type != "meta" or a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    )


def slot_name(param_groups: ParamGroups, slot: Slot) -> str:
    """The FQN of a slot if its group carries ``param_names`` (or ``fqns``: torch forbids the former
    in a group without parameters, which sub-optimizers may have), else ``group<g>.param<i>``."""
    group = param_groups[slot.group]
    names: Sequence[str] | None = group.get("param_names") or group.get("fqns")
    return names[slot.position] if names else f"group{slot.group}.param{slot.position}"


def stream_of(name: str, first_element: int = 0) -> int:
    """The stream of random numbers of a parameter, from its name and the place of its first local
    element."""
    return zlib.crc32(name.encode()) | first_element << 32


_PLAIN = (Tensor, torch.nn.Parameter)
_ATTRIBUTES = operator.attrgetter("__dict__")


def current_grad(param: Tensor) -> Tensor | None:
    """A parameter's gradient of this step: ``main_grad`` if present, else ``decoupled_grad``, else
    ``grad``."""
    for attribute in ("main_grad", "decoupled_grad", "grad"):
        grad: Tensor | None = getattr(param, attribute, None)
        if grad is not None:
            return grad
    return None


def have_grad_only(params: Sequence[Tensor]) -> bool:
    """Whether the gradient of every one of these plain parameters can only be its ``grad``."""
    return not [
        True for own in map(_ATTRIBUTES, params) if "main_grad" in own or "decoupled_grad" in own
    ]


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor is a DTensor or another subclass whose memory is somewhere else."""
    return set(map(type, tensors)) <= set(_PLAIN)


def all_same(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor a rank owns: a DTensor's local shard, anything else detached from
    autograd."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
        # FSDP2 may hand out an AsyncCollectiveTensor; placement and kernels need the plain one.
        tensor = getattr(tensor, "wait", lambda: tensor)()
    return tensor.detach()


def local_grad(param: Tensor, grad: Tensor) -> Tensor:
    """The rank's part of a parameter's gradient. One that is split in another way than its
    parameter, or still to be added up (tensor parallelism leaves such ones), is brought into the
    parameter's layout: a collective."""
    if (
        isinstance(param, DTensor)
        and isinstance(grad, DTensor)
        and grad.placements != param.placements
    ):
        grad = grad.redistribute(placements=param.placements)
    return local_tensor(grad)


def update_of(slot: Slot, name: str, param: Tensor, grad: Tensor) -> SlotUpdate:
    """A parameter's own gradient as an update, with all that a rule may ask about where the
    parameter lies.

    Raises:
        ValueError: the parameter is a DTensor in a layout that cannot be stepped.
    """
    return SlotUpdate(
        slot,
        local_grad(param, grad),
        shard_groups=shard_groups_of(name, param),
        stream=stream_of(name, getattr(param, "first_element", 0)),
        layout=layout_of(param),
    )


def follow(main: Tensor, local: Tensor, name: str) -> bool:
    """Make a main param agree with a model tensor that was replaced or written from outside.

    A main param that already rounds to the new values keeps its extra bits; otherwise it takes the
    new values. Returns whether it took them.

    Raises:
        ValueError: if the shape changed.
    """
    if main.shape != local.shape:
        raise ValueError(
            f"{name}: the parameter's local shape changed from {tuple(main.shape)} to "
            f"{tuple(local.shape)} after its optimizer state was created; shard the model first, "
            "then build the optimizer"
        )
    if torch.equal(main.to(device=local.device, dtype=local.dtype), local):
        return False
    main.copy_(local)
    return True


class SlotStateView(MutableMapping[Tensor, dict[str, Any]]):
    """``optimizer.state`` as torch expects it: current tensors as keys, slots underneath.

    The tensor-to-slot index is a cache that is checked against ``param_groups`` at every lookup, so
    a replaced tensor is found under its new identity at once and under its old one no more.
    """

    def __init__(
        self,
        param_groups: Callable[[], ParamGroups],
        read: Callable[[Slot], dict[str, Any]],
        write: Callable[[Slot, dict[str, Any]], None],
    ) -> None:
        self._param_groups = param_groups
        self._read = read
        self._write = write
        self._index: dict[int, Slot] = {}

    def _slot(self, tensor: Tensor) -> Slot:
        slot = self._index.get(id(tensor))
        if slot is None or not self._holds(slot, tensor):
            self._index = {id(p): s for s, p in iter_slots(self._param_groups())}
            slot = self._index.get(id(tensor))
        if slot is None:
            raise KeyError("this tensor is not a parameter of the optimizer (was it replaced?)")
        return slot

    def _holds(self, slot: Slot, tensor: Tensor) -> bool:
        groups = self._param_groups()
        return (
            slot.group < len(groups)
            and slot.position < len(groups[slot.group]["params"])
            and groups[slot.group]["params"][slot.position] is tensor
        )

    def __getitem__(self, tensor: Tensor) -> dict[str, Any]:
        return self._read(self._slot(tensor))

    def __setitem__(self, tensor: Tensor, state: dict[str, Any]) -> None:
        self._write(self._slot(tensor), state)

    def __delitem__(self, tensor: Tensor) -> None:
        raise TypeError("a slot's state cannot be deleted; load_state_dict replaces it")

    def __iter__(self) -> Iterator[Tensor]:
        return (param for slot, param in iter_slots(self._param_groups()) if self._read(slot))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, tensor: object) -> bool:
        try:
            return isinstance(tensor, torch.Tensor) and bool(self._read(self._slot(tensor)))
        except KeyError:
            return False
