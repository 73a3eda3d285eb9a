"""Tensors of slots: their gradients, what a rank owns of them, and lists whose facts are looked up
once; and parameters as they were last seen, to notice what was done to them from outside."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.config.state_forms import blocks_of
from mp_optim.core.identity import ParamGroups, iter_slots
from mp_optim.host.leases import before_writing
from mp_optim.host.torch_types import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NBYTES = operator.attrgetter("nbytes")
_DTYPE = operator.attrgetter("dtype")
_DICT, _GRAD = operator.attrgetter("__dict__"), operator.attrgetter("grad")
_LEAST_ADDRESS = 1 << 38
"""Beyond what a storage may hold (256 GiB), and below what memory most processes have."""
_PIECE = 1 << 16
"""Elements of a main param that are compared with the model's at a time."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes."""


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
        block_ends: scaled blocks of each and of all before it.
        held: memory kept for as long as the list is, as tensors; see :meth:`hold`.
    """

    held: tuple[Tensor, ...] = ()

    def gradients_of(self, params: CachedTensorList) -> CachedTensorList:
        """The same tensors, known to be what is in ``params``' ``grad``: torch allows only the
        shapes and devices of the parameters there."""
        self.__dict__.update(sizes=params.sizes, devices=params.devices)
        return self

    def hold(self) -> CachedTensorList:
        """Keep the present memory, for a list used over many steps: should one of the tensors be
        given other memory (``tensor.data = ...``), the addresses still lead somewhere."""
        self.held = tuple(map(Tensor.detach, self))
        self.addresses = array("Q", list(map(Tensor.data_ptr, self.held)))
        return self

    def has_moved(self) -> bool:
        """Return whether a tensor has other memory than when :attr:`addresses` were looked up."""
        return array("Q", list(map(Tensor.data_ptr, self))) != self.addresses

    def memory_of(self, tensor: Tensor) -> Tensor | None:
        """Return the memory that a tensor of the list had when it was held, or None."""
        pairs = zip(self, self.held, strict=False)
        return next((memory for own, memory in pairs if own is tensor), None)

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> CachedTensorList:
        """The same tensors in this form."""
        return tensors if isinstance(tensors, CachedTensorList) else cls(tensors)

    @cached_property
    def addresses(self) -> array[int]:
        return array("Q", list(map(Tensor.data_ptr, self)))  # of a list it is made at once

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
        # Without memory a tensor's address is how far it begins in its storage.
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
    if is_dtensor(tensor):
        tensor = tensor.to_local()
        # FSDP2 may hand out an AsyncCollectiveTensor; placement and kernels need the plain one.
        tensor = getattr(tensor, "wait", lambda: tensor)()
    return tensor.detach()


def device_of(param_groups: ParamGroups) -> torch.device:
    """Return the device of the first parameter; the host's without parameters."""
    params = (local_tensor(param) for _, param in iter_slots(param_groups))
    return next((param.device for param in params), torch.device("cpu"))


def whole_tensor(tensor: DTensor) -> Tensor:
    """All of a DTensor, whose parts may rest on the host: collectives reach the mesh's devices."""
    there: Any = tensor.to(tensor.device_mesh.device_type)
    whole: Tensor = there.full_tensor()
    return whole


def held_tensor(tensor: Tensor) -> Tensor:
    """What a DTensor holds, without a detour through autograd; anything else as it is. For marks
    (versions, addresses) alone: a collective on it may still be under way."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


GRADIENT_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
"""Dtypes of gradients that are stepped."""


def current_grad(param: Tensor) -> Tensor | None:
    """A parameter's gradient of this step: ``main_grad`` if present, else ``decoupled_grad``, else
    ``grad``."""
    for attribute in ("main_grad", "decoupled_grad", "grad"):
        grad: Tensor | None = getattr(param, attribute, None)
        if grad is not None:
            return grad
    return None


def current_grads(params: Sequence[Tensor]) -> list[Tensor | None]:
    """:func:`current_grad` of each."""
    return list(map(_GRAD if have_grad_only(params) else current_grad, params))


def have_grad_only(params: Sequence[Tensor]) -> bool:
    """Whether the gradient of every one of these plain parameters can only be its ``grad``."""
    return not [
        True
        for attributes in map(_DICT, params)
        if "main_grad" in attributes or "decoupled_grad" in attributes
    ]


def local_grad(param: Tensor, grad: Tensor) -> Tensor:
    """The rank's part of a parameter's gradient. One that is split in another way than its
    parameter, or still to be added up (tensor parallelism leaves such ones), is brought into the
    parameter's layout: a collective."""
    if is_dtensor(param) and is_dtensor(grad) and grad.placements != param.placements:
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
    """Let a main param continue from its model tensor where it does not round to it.

    Elements that round to the model's value keep their extra bits. Returns whether any took
    another value; waits for the tensors' devices.

    Raises:
        ValueError: if the shape changed.
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
    """Give elements of main params the model's value where they do not round to it.

    Waits for no accelerator. NaN equals NaN; apart from that values are compared bit for bit.

    Args:
        mains: FP32 or bfloat16, written in place.
        weights: the model's tensors, on the same devices; None where main is the model's.
        changed: for each a bitmap, uint8, in which all bits are set if some element differs.
        may_read: leave main params in host memory alone if nothing differs, which reads a result.
    """
    before_writing(mains)
    for index, (main, weight) in enumerate(zip(mains, weights, strict=True)):
        if weight is None:
            continue
        for part, here in _in_pieces(main, weight):
            if may_read and part.is_cpu and part.dtype == here.dtype:
                bits = _BITS[here.itemsize]
                if torch.equal(part.view(bits), here.view(bits)):  # one read of both
                    continue
            same = _rounds_to(part, here)
            if may_read and part.is_cpu and bool(same.all()):
                continue
            part.copy_(torch.where(same, part, here.to(part.dtype)))
            if changed is not None:
                changed[index].bitwise_or_(same.all().logical_not().to(torch.uint8) * 255)


def _rounds_to(main: Tensor, weights: Tensor) -> Tensor:
    """Return which elements of a main param round to the model's, a bool tensor."""
    rounded, bits = main.to(weights.dtype), _BITS[weights.itemsize]
    same = rounded.view(bits) == weights.view(bits)
    return same.logical_or_(rounded.isnan().logical_and_(weights.isnan()))


def _in_pieces(main: Tensor, weights: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Split two tensors into pieces that stay in a CPU's cache."""
    if main.is_cpu and main.is_contiguous() and weights.is_contiguous():
        parts = (torch.split(tensor.view(-1), _PIECE) for tensor in (main, weights))
        return zip(*parts, strict=True)
    return [(main, weights)]


# -- parameters as they were last seen -------------------------------------------------------------


class Marks(NamedTuple):
    """What changes when parameters are replaced, moved or laid out anew, as columns: one call of C
    for each entry.

    How large the memory is says its address: torch never resizes memory where it lies. Of what is
    contiguous the shape says the strides, so that True stands for them.
    """

    addresses: list[int]
    shapes: list[torch.Size]
    strides: list[Any]
    dtypes: list[torch.dtype]

    @classmethod
    def of(cls, params: Sequence[Tensor], plain: bool) -> Marks:
        """The marks of some parameters; ``plain`` is whether all are plain tensors."""
        held = params if plain else list(map(held_tensor, params))
        if plain:
            addresses = list(map(Tensor.data_ptr, held))
        else:
            addresses = [tensor.data_ptr() if are_plain([tensor]) else 0 for tensor in held]
        strides: list[Any] = list(map(Tensor.is_contiguous, held))
        if not all(strides):
            strides = [yes or tensor.stride() for yes, tensor in zip(strides, held, strict=True)]
        shapes, dtypes = list(map(Tensor.size, held)), list(map(_DTYPE, held))
        return cls(addresses, shapes, strides, dtypes)

    def rows(self) -> Iterable[tuple[Any, ...]]:
        """The marks of each parameter."""
        return zip(*self, strict=True)


class SeenParams:
    """Parameters as they were last seen: the memory and layout of each. To replace, move or reshape
    one changes that, ``param.data = ...`` included.

    New memory at the address of freed memory counts as the same: an alias of the old memory would
    have kept that address from being used again.

    Attributes:
        params: the tensors.
        plain: whether all of them are plain tensors.
        marks: how they were.
    """

    def __init__(self, params: Iterable[Tensor] = ()) -> None:
        self.params: list[Tensor] = []
        self.plain = True
        self.marks = Marks([], [], [], [])
        self.extend(list(params))

    def extend(self, params: Sequence[Tensor]) -> None:
        """Take more parameters as seen."""
        plain = are_plain(params)
        self.params += params
        columns: Iterable[tuple[list[Any], list[Any]]]
        columns = zip(self.marks, Marks.of(params, plain), strict=True)
        for column, more in columns:
            column += more
        self.plain = self.plain and plain

    def look(self, params: Sequence[Tensor]) -> None:
        """Take what is there now as seen."""
        self.plain = are_plain(params)
        self.marks, self.params = Marks.of(params, self.plain), list(params)

    def changed(self, params: Sequence[Tensor]) -> list[int]:
        """Return the indices of parameters that are other tensors than were last seen, or were
        moved or reshaped since."""
        same = all_same(params, self.params)
        marks = Marks.of(params, self.plain if same else are_plain(params))
        if same and marks == self.marks:
            return []
        rows = zip(params, self.params, marks.rows(), self.marks.rows(), strict=True)
        return [
            index
            for index, (param, seen, now, before) in enumerate(rows)
            if param is not seen or now != before
        ]

    def moved(self, params: Sequence[Tensor]) -> bool:
        """Whether parameters are others than were last seen, or were moved or reshaped since."""
        return len(params) != len(self.params) or bool(self.changed(params))

    def is_same(self, index: int, param: Tensor) -> bool:
        """Whether a parameter is the one that was last seen at an index, and was neither moved nor
        reshaped since."""
        if param is not self.params[index]:
            return False
        now: Iterable[list[Any]] = Marks.of([param], self.plain)
        before: Iterable[list[Any]] = self.marks
        return all(a[0] == b[index] for a, b in zip(now, before, strict=True))

    def has_shape(self, index: int, param: Tensor) -> bool:
        """Whether a parameter has the shape of the one that was last seen at an index."""
        return held_tensor(param).shape == self.marks.shapes[index]


def check_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters whose elements share memory, with each other or with another parameter's.

    Two views whose ranges of bytes overlap are refused, even if they have no element in common.

    Raises:
        ValueError: there are some, naming them.
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
                "its elements are one memory (expand), so a step has no single value for them; "
                "make it with .contiguous() or .clone(), or train what it was expanded from"
            )
        last = sum((size - 1) * step for size, step in sides)
        first = local.data_ptr()
        spans.append((str(local.device), first, first + (last + 1) * local.itemsize, name))
    spans.sort()
    for (device, _, end, name), (there, start, _, other) in itertools.pairwise(spans):
        if device == there and start < end:
            raise ValueError(
                f"{name} and {other} are two parameters that share memory, which two states "
                "would step against each other; tie them by using one Parameter in both modules, "
                "or copy one (.clone()) if they are views side by side"
            )
