"""Tensors of slots: gradients, local shards, lists with cached properties, and fingerprints that
detect changes of parameters by other code."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mp_optim.config.state_forms import blocks_of
from mp_optim.host.leases import before_writing
from mp_optim.host.torch_types import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NBYTES = operator.attrgetter("nbytes")
_DTYPE = operator.attrgetter("dtype")
_DICT, _GRAD = operator.attrgetter("__dict__"), operator.attrgetter("grad")
_LEAST_ADDRESS = 1 << 38
"""Smallest ``data_ptr`` that proves that a tensor has memory. Without memory, ``data_ptr`` is the
tensor's offset in the storage, which is below 256 GiB. Real addresses are usually above."""
_PIECE = 1 << 16
"""Number of elements of a main param that are compared with the model's parameter at a time."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size, in bytes."""


class CachedTensorList(list[Tensor]):
    """A list of plain tensors that reads each property of its tensors once. The memory of the
    tensors must not move while the list is used.

    Attributes:
        addresses: ``data_ptr`` of each tensor.
        sizes: ``numel`` of each tensor. A step may copy the sizes from an earlier list instead of
            reading the tensors.
        own_sizes: ``numel`` of each tensor, always read from the tensors of this list.
        stored: True if no tensor's memory was freed (``untyped_storage().resize_(0)``).
        dtypes: set of the dtypes.
        devices: set of the devices.
        contiguous: True if all tensors are contiguous.
        block_ends: running sums of the tensors' numbers of scaled blocks.
        held: tensors that keep the memory alive as long as the list; see :meth:`hold`.
    """

    held: tuple[Tensor, ...] = ()

    def hold(self) -> CachedTensorList:
        """Keep the present memory of the tensors alive, and return this list.

        A list that is reused in many steps needs this call, so that its addresses stay valid even
        if a tensor gets other memory (``tensor.data = ...``).
        """
        self.held = tuple(map(Tensor.detach, self))
        self.addresses = array("Q", list(map(Tensor.data_ptr, self.held)))
        return self

    def has_moved(self) -> bool:
        """True if any tensor's memory is no longer at the address in :attr:`addresses`."""
        return array("Q", list(map(Tensor.data_ptr, self))) != self.addresses

    def memory_of(self, tensor: Tensor) -> Tensor | None:
        """Return the memory that :meth:`hold` kept for a tensor of the list, or None."""
        pairs = zip(self, self.held, strict=False)
        return next((memory for own, memory in pairs if own is tensor), None)

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> CachedTensorList:
        """Return tensors as a CachedTensorList; a CachedTensorList is returned unchanged."""
        return tensors if isinstance(tensors, CachedTensorList) else cls(tensors)

    @classmethod
    def joined(cls, lists: Sequence[CachedTensorList]) -> CachedTensorList:
        """Return the tensors of several lists as one list, with the properties of these lists."""
        whole = cls(itertools.chain.from_iterable(lists))
        whole.addresses, whole.sizes, whole.own_sizes = array("Q"), array("q"), array("q")
        for each in lists:
            whole.addresses.extend(each.addresses)
            whole.sizes.extend(each.sizes)
            whole.own_sizes.extend(each.own_sizes)
        whole.dtypes = set().union(*(each.dtypes for each in lists))
        whole.devices = set().union(*(each.devices for each in lists))
        whole.contiguous = all(each.contiguous for each in lists)
        return whole

    @cached_property
    def addresses(self) -> array[int]:
        # array() is faster from a list than from an iterator.
        return array("Q", list(map(Tensor.data_ptr, self)))

    @cached_property
    def sizes(self) -> array[int]:
        return array("q", list(map(Tensor.numel, self)))

    @cached_property
    def block_ends(self) -> list[int]:
        return list(itertools.accumulate(map(blocks_of, self.sizes)))

    @cached_property
    def own_sizes(self) -> array[int]:
        return array("q", list(map(Tensor.numel, self)))

    @cached_property
    def stored(self) -> bool:
        # A large address proves that the tensor has memory. Only for small addresses compare the
        # sizes of the storages.
        if min(self.addresses, default=_LEAST_ADDRESS) >= _LEAST_ADDRESS:
            return True
        held = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, self))
        return all(map(operator.ge, held, map(_NBYTES, self)))

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        return set(map(_DTYPE, self))

    @cached_property
    def devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self}

    @cached_property
    def contiguous(self) -> bool:
        return all(map(Tensor.is_contiguous, self))


_PLAIN = (Tensor, torch.nn.Parameter)


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """True if all tensors are of torch's own classes. A DTensor or another subclass may keep its
    memory in other tensors."""
    return set(map(type, tensors)) <= set(_PLAIN)


def all_same(a: Sequence[object], b: Sequence[object]) -> bool:
    """True if two sequences contain the same objects in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def same_memory(a: Tensor, b: Tensor) -> bool:
    """True if two tensors have the same memory, dtype, shape and strides."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.device == b.device
        and (a.device.type != "meta" or a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's plain tensor, detached from autograd: the local shard of a DTensor, or the
    tensor itself."""
    if is_dtensor(tensor):
        tensor = tensor.to_local()
        # FSDP2 may return an AsyncCollectiveTensor, but placement and kernels need a plain tensor.
        tensor = getattr(tensor, "wait", lambda: tensor)()
    return tensor.detach()


def whole_tensor(tensor: DTensor) -> Tensor:
    """Return the full tensor of a DTensor. Collective.

    A shard on the host is copied to the mesh's device first, because the collective runs there.
    """
    there: Any = tensor.to(tensor.device_mesh.device_type)
    whole: Tensor = there.full_tensor()
    return whole


def held_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor without autograd, or any other tensor unchanged.

    Use the result for versions and addresses only, because a collective may still write to the
    shard.
    """
    return tensor._local_tensor if is_dtensor(tensor) else tensor


GRADIENT_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
"""Dtypes of gradients that the optimizers can step with."""


def current_grad(param: Tensor) -> Tensor | None:
    """Return the gradient that the next step uses: ``main_grad``, else ``decoupled_grad``, else
    ``grad``; None if there is none."""
    for attribute in ("main_grad", "decoupled_grad", "grad"):
        grad: Tensor | None = getattr(param, attribute, None)
        if grad is not None:
            return grad
    return None


def current_grads(params: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the result of :func:`current_grad` for each parameter."""
    return list(map(_GRAD if have_grad_only(params) else current_grad, params))


def have_grad_only(params: Sequence[Tensor]) -> bool:
    """True if no plain parameter has a ``main_grad`` or ``decoupled_grad`` attribute."""
    return not [
        True
        for attributes in map(_DICT, params)
        if "main_grad" in attributes or "decoupled_grad" in attributes
    ]


def local_grad(param: Tensor, grad: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient.

    If a DTensor's gradient has other placements than its parameter, the gradient is redistributed
    first, by a collective. For example, tensor parallelism leaves ``Partial`` gradients, which are
    summed.
    """
    if is_dtensor(param) and is_dtensor(grad) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_tensor(grad)


def check_shape(before: Tensor, local: Tensor, name: str) -> None:
    """Raise ValueError unless a parameter's local tensor fits the tensor that is stepped for it.

    Args:
        before: the stepped tensor.
        local: the parameter's present local tensor.
        name: FQN of the parameter, for messages.

    Raises:
        ValueError: the shape changed, or the memory is smaller than the tensor.
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
            "(untyped_storage().resize_); restore its values before using the optimizer"
        )


def has_memory(tensor: Tensor) -> bool:
    """True if all elements of a tensor are inside its storage."""
    if tensor.is_meta or not are_plain([tensor]) or not tensor.numel():
        return True
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in extents)
    return (last + 1) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def follow(main: Tensor, local: Tensor, name: str) -> bool:
    """Replace each element of a main param that does not round to the model's value by that value.
    Other elements keep their extra bits. Waits for the tensors' devices.

    Args:
        main: the main param; written in place.
        local: the model's local tensor.
        name: FQN of the parameter, for messages.

    Returns:
        True if any element changed.

    Raises:
        ValueError: the shape changed.
    """
    check_shape(main, local, name)
    weights = local.to(main.device)
    if bool(_rounds_to(main, weights).all()):
        return False
    continue_from([main], [weights])
    return True


def continue_from(
    mains: Sequence[Tensor],
    weights: Iterable[Tensor | None],
    changed: Sequence[Tensor] | None = None,
    *,
    may_read: bool = True,
) -> None:
    """Replace each element of main params that does not round to the model's value by that value.

    Does not wait for accelerators. NaN equals NaN; all other values are compared bit for bit.

    Args:
        mains: FP32 or bfloat16 main params; written in place.
        weights: the model's tensor for each main param, on the same device; None if the main param
            is the model's own tensor.
        changed: one uint8 bitmap for each main param; all of its bits are set if any element
            changes.
        may_read: True to compare main params in host memory first, so that equal main params are
            not written.
    """
    before_writing(mains)
    for index, (main, weight) in enumerate(zip(mains, weights, strict=True)):
        if weight is None:
            continue
        pieces: Iterable[tuple[Tensor, Tensor]] = [(main, weight)]
        if main.is_cpu and main.is_contiguous() and weight.is_contiguous():
            # A piece fits the CPU's cache, so the second read of a piece does not go to memory.
            split = (torch.split(tensor.view(-1), _PIECE) for tensor in (main, weight))
            pieces = zip(*split, strict=True)
        for part, here in pieces:
            if may_read and part.is_cpu and part.dtype == here.dtype:
                bits = _BITS[here.itemsize]
                # Compare with torch.equal() first, because torch.equal() allocates no temporary
                # tensors.
                if torch.equal(part.view(bits), here.view(bits)):
                    continue
            same = _rounds_to(part, here)
            if may_read and part.is_cpu and bool(same.all()):
                continue
            part.copy_(torch.where(same, part, here.to(part.dtype)))
            if changed is not None:
                changed[index].bitwise_or_(same.all().logical_not().to(torch.uint8) * 255)


def _rounds_to(main: Tensor, weights: Tensor) -> Tensor:
    """Return a bool tensor: True where a main param rounds to the model's value."""
    rounded, bits = main.to(weights.dtype), _BITS[weights.itemsize]
    same = rounded.view(bits) == weights.view(bits)
    return same.logical_or_(rounded.isnan().logical_and_(weights.isnan()))


# -- fingerprints of parameters --------------------------------------------------------------------


def _fingerprints(params: Sequence[Tensor], plain: bool) -> tuple[list[Any], ...]:
    """Return fingerprints of parameters as four lists: addresses, shapes, strides and dtypes.

    An entry changes if its parameter is replaced, moved, resized or gets another layout. torch
    never resizes memory in place, so the address covers the size. The strides of a contiguous
    tensor follow from its shape, so the entry in the list of strides is True.

    Args:
        params: the parameters.
        plain: True if all of the parameters are plain tensors.
    """
    # One C call reads a property of all parameters, which is faster than a loop.
    held = params if plain else list(map(held_tensor, params))
    if plain:
        addresses = list(map(Tensor.data_ptr, held))
    else:
        addresses = [tensor.data_ptr() if are_plain([tensor]) else 0 for tensor in held]
    strides: list[Any] = list(map(Tensor.is_contiguous, held))
    if not all(strides):
        strides = [yes or tensor.stride() for yes, tensor in zip(strides, held, strict=True)]
    return addresses, list(map(Tensor.size, held)), strides, list(map(_DTYPE, held))


class ParamWatcher:
    """Fingerprints of parameters, by which a replaced, moved or reshaped parameter is found
    (``param.data = ...`` included).

    New memory at the address of freed memory, with the same shape, strides and dtype, counts as
    unchanged. That is safe: a tensor that still uses the old memory keeps it from being freed, and
    the new memory then has another address.

    Attributes:
        params: the tensors.
        plain: True if all of them are plain tensors.
        shapes: shape of each tensor.
    """

    params: list[Tensor]
    plain: bool
    shapes: list[torch.Size]
    _fingerprints: tuple[list[Any], ...]

    def __init__(self, params: Sequence[Tensor] = ()) -> None:
        self.look(params)

    def extend(self, params: Sequence[Tensor]) -> None:
        """Append parameters, and record their present fingerprints."""
        plain = are_plain(params)
        self.params += params
        for column, more in zip(self._fingerprints, _fingerprints(params, plain), strict=True):
            column += more
        self.plain = self.plain and plain

    def look(self, params: Sequence[Tensor]) -> None:
        """Replace all recorded parameters, and record their present fingerprints."""
        self.params, self.plain = list(params), are_plain(params)
        self._fingerprints = _fingerprints(params, self.plain)
        self.shapes = self._fingerprints[1]

    def changed(self, params: Sequence[Tensor]) -> list[int]:
        """Return the indices of parameters that were replaced, moved or reshaped since their
        fingerprints were taken."""
        same = all_same(params, self.params)
        present = _fingerprints(params, self.plain if same else are_plain(params))
        if same and present == self._fingerprints:
            return []
        now_and_before = (zip(*columns, strict=True) for columns in (present, self._fingerprints))
        rows = zip(params, self.params, *now_and_before, strict=True)
        return [
            index
            for index, (param, seen, now, before) in enumerate(rows)
            if param is not seen or now != before
        ]

    def moved(self, params: Sequence[Tensor]) -> bool:
        """True if the number of parameters changed, or any was replaced, moved or reshaped."""
        return len(params) != len(self.params) or bool(self.changed(params))

    def is_same(self, index: int, param: Tensor) -> bool:
        """True if a parameter is the one that was recorded at an index, and was neither moved nor
        reshaped."""
        if param is not self.params[index]:
            return False
        now = _fingerprints([param], self.plain)
        return all(a[0] == b[index] for a, b in zip(now, self._fingerprints, strict=True))


def check_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two parameters share memory, or if several elements of one parameter
    share an address.

    Two views with overlapping byte ranges are refused, even if they have no common element.

    Args:
        named: names and parameters.

    Raises:
        ValueError: memory is shared; the message has the names.
    """
    spans: list[tuple[str, int, int, str]] = []
    for name, param in named:
        local = held_tensor(param)
        if local.is_meta or not are_plain([local]) or not local.numel():
            continue
        sides = list(zip(local.shape, local.stride(), strict=True))
        if any(size > 1 and step == 0 for size, step in sides):
            raise ValueError(
                f"{name} has shape {tuple(local.shape)} and strides {local.stride()}: several of "
                "its elements share one address (expand), so a step has no single value for "
                "them; copy the parameter with .contiguous() or .clone(), or train the tensor "
                "before expand"
            )
        last = sum((size - 1) * step for size, step in sides)
        first = local.data_ptr()
        spans.append((str(local.device), first, first + (last + 1) * local.itemsize, name))
    spans.sort()
    for (device, _, end, name), (there, start, _, other) in itertools.pairwise(spans):
        if device == there and start < end:
            raise ValueError(
                f"{name} and {other} are two parameters that share memory, and two states would "
                "overwrite each other's steps; tie the parameters by using one Parameter in both "
                "modules, or, if they are views of one tensor, copy one view (.clone())"
            )
