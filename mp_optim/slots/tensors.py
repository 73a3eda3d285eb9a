"""Tensors of slots: what a rank owns, and lists whose facts are looked up once."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.process.host_memory import same_values
from mp_optim.process.leases import before_writing

_NBYTES = operator.attrgetter("nbytes")
_DTYPE = operator.attrgetter("dtype")
_LEAST_ADDRESS = 1 << 38
"""Beyond what a storage may hold (256 GiB), and below what memory most processes have."""
T = TypeVar("T")


class lazy(Generic[T]):  # as functools.cached_property, without its lock
    """An attribute that is worked out when it is first asked for, and may be assigned."""

    def __init__(self, work_out: Callable[[Any], T]) -> None:
        self._work_out, self._name = work_out, work_out.__name__

    def __get__(self, owner: Any, kind: type | None = None) -> T:
        value = owner.__dict__[self._name] = self._work_out(owner)
        return value


class CachedTensorList(list[Tensor]):
    """Plain tensors whose memory stays where it is for as long as the list is used, so that each
    fact about them is looked up once.

    Attributes:
        addresses: ``data_ptr`` of each.
        sizes: ``numel`` of each.
        own_sizes: the same, looked up even if it was known (:meth:`gradients_of`).
        stored: whether no memory was given back (``untyped_storage().resize_(0)``), and where that
            has to be looked up no storage is smaller than its tensor.
        dtypes, devices: those that occur.
        contiguous: whether all are.
        held: memory kept for as long as the list is; see :meth:`hold`.
    """

    held: tuple[object, ...] = ()

    def gradients_of(self, params: CachedTensorList) -> CachedTensorList:
        """The same tensors, known to be what is in ``params``' ``grad``: torch allows only the
        shapes and devices of the parameters there."""
        self.__dict__.update(sizes=params.sizes, devices=params.devices)
        return self

    def hold(self) -> CachedTensorList:
        """Keep the present memory, for a list used over many steps: should one of the tensors be
        given other memory (``tensor.data = ...``), the addresses still lead somewhere."""
        self.held = tuple(tensor.untyped_storage() for tensor in self)
        return self

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> CachedTensorList:
        """The same tensors in this form."""
        return tensors if isinstance(tensors, CachedTensorList) else cls(tensors)

    @lazy
    def addresses(self) -> array[int]:
        return array("Q", list(map(Tensor.data_ptr, self)))  # of a list it is made at once

    @lazy
    def sizes(self) -> array[int]:
        return array("q", list(map(Tensor.numel, self)))

    @lazy
    def own_sizes(self) -> array[int]:
        return array("q", list(map(Tensor.numel, self)))

    @lazy
    def stored(self) -> bool:
        # Without memory a tensor's address is how far it begins in its storage.
        if min(self.addresses, default=_LEAST_ADDRESS) >= _LEAST_ADDRESS:
            return True
        held = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, self))
        return all(map(operator.ge, held, map(_NBYTES, self)))

    @lazy
    def dtypes(self) -> set[torch.dtype]:
        return set(map(_DTYPE, self))

    @lazy
    def devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self}

    @lazy
    def contiguous(self) -> bool:
        return all(map(Tensor.is_contiguous, self))


_PLAIN = (Tensor, torch.nn.Parameter)


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor is a DTensor or another subclass whose memory is somewhere else."""
    return set(map(type, tensors)) <= set(_PLAIN)


def all_same(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


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


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor a rank owns: a DTensor's local shard, anything else detached from
    autograd."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
        # FSDP2 may hand out an AsyncCollectiveTensor; placement and kernels need the plain one.
        tensor = getattr(tensor, "wait", lambda: tensor)()
    return tensor.detach()


def whole_tensor(tensor: DTensor) -> Tensor:
    """All of a DTensor, whose parts may rest on the host: collectives reach the mesh's devices."""
    there: Any = tensor.to(tensor.device_mesh.device_type)
    whole: Tensor = there.full_tensor()
    return whole


def held_tensor(tensor: Tensor) -> Tensor:
    """What a DTensor holds, without a detour through autograd; anything else as it is. For marks
    (versions, addresses) alone: a collective on it may still be under way."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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


def check_shape(before: Tensor, local: Tensor, name: str) -> None:
    """Check what a parameter has here against the tensor that is stepped for it.

    Raises:
        ValueError: its shape changed, or its memory does not hold it any more.
    """
    if before.shape != local.shape:
        raise ValueError(
            f"{name}: the parameter's local shape changed from {tuple(before.shape)} to "
            f"{tuple(local.shape)} after its optimizer state was created; shard or prune the model "
            "first, then build the optimizer"
        )
    if not has_memory(local):
        raise ValueError(
            f"{name}: the parameter's memory was freed or made smaller than the parameter "
            "(untyped_storage().resize_): bring its values back before the optimizer is used"
        )


def has_memory(tensor: Tensor) -> bool:
    """Whether all elements of a tensor with strides lie in its memory."""
    if tensor.is_meta or not are_plain([tensor]) or not tensor.numel():
        return True
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in extents)
    return (last + 1) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def follow(main: Tensor, local: Tensor, name: str) -> bool:
    """Make a main param agree with a model tensor that was replaced or written from outside.

    A main param that already rounds to the new values keeps its extra bits; otherwise it takes the
    new values. Returns whether it took them.

    Raises:
        ValueError: if the shape changed.
    """
    check_shape(main, local, name)
    if same_values(main.to(device=local.device, dtype=local.dtype), local):
        return False
    before_writing([main])
    main.copy_(local)
    return True
