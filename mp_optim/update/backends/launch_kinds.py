"""Which tensors go into one launch: those that share the dtypes of all their parts, and fit each
other."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.slots import CachedTensorList
from mp_optim.slots.state_keys import AVERAGE, REMAINDER, scale_key
from mp_optim.update.codecs import blocks_of, is_blocked, packed_bytes
from mp_optim.update.kernel_args import TensorLists

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that kernels read."""
_OUTPUTS: dict[
    tuple[torch.dtype | None, torch.dtype | None], tuple[torch.dtype | None, ...]
] = {
    (None, None): FLOATS,
    (torch.float32, None): (None, *FLOATS),
    (torch.bfloat16, torch.int16): (None, torch.bfloat16),
    (torch.bfloat16, torch.int8): (None, torch.bfloat16),
}
"""Dtypes of outputs, by those of main params and remainders."""


class Kind(NamedTuple):
    """Dtypes that the tensors of a launch share; None where there is no tensor."""

    grad: torch.dtype
    main: torch.dtype | None = None
    remainder: torch.dtype | None = None
    moment1: torch.dtype | None = None
    moment2: torch.dtype | None = None
    output: torch.dtype | None = None
    average: torch.dtype | None = None

    @property
    def is_supported(self) -> bool:
        """Whether there are kernels for it."""
        return (
            self.grad in FLOATS
            and self.moment1 in (None, *FLOATS, torch.int8, torch.uint8)
            and self.moment2 in (None, *FLOATS, torch.uint8)
            and self.output in _OUTPUTS.get((self.main, self.remainder), ())
            and self.average in (None, torch.float32, torch.bfloat16)
        )


class Part(NamedTuple):
    """Tensors of one kind: where they are in the lists, and the lists of them alone. A kind of
    None: no kernel."""

    indices: Sequence[int]
    kind: Kind | None
    lists: TensorLists


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one: the kernels launch on the current device's stream whatever
    they are handed."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def kept_moments(lists: TensorLists, moments: tuple[str, ...]) -> tuple[str, ...]:
    """Names of a rule's moments, with "" in place of those that are not kept."""
    return tuple(name if name in lists.state else "" for name in moments)


def parts_of(lists: TensorLists, moments: tuple[str, ...]) -> list[Part]:
    """The lists by kind; the lists themselves if all tensors are of one.

    Args:
        moments: names of the first and the second one, "" for one that is not kept.
    """
    if not lists.grad:
        return []
    names = [*moments, "", ""][:2]
    columns: list[Sequence[Tensor | None] | None] = [
        lists.grad,
        lists.main or None,
        lists.state.get(REMAINDER),
        *(lists.state[name] if name else None for name in names),
        lists.output,
        lists.state.get(AVERAGE),
    ]
    dtypes = [_dtypes(column) for column in columns]
    if all(len(each) == 1 for each in dtypes):
        kind = Kind(*(next(iter(each)) for each in dtypes))  # type: ignore[arg-type]  # grad is a list
        return [Part(range(len(lists.grad)), _supported(kind, lists, moments), lists)]
    rows = [_kind(columns, index) for index in range(len(lists.grad))]
    parts = []
    for kind in dict.fromkeys(rows):
        indices = [index for index, other in enumerate(rows) if other == kind]
        part = lists.take(indices)
        parts.append(Part(indices, _supported(kind, part, moments), part))
    return parts


def _dtypes(column: Sequence[Tensor | None] | None) -> set[torch.dtype | None]:
    if column is None:
        return {None}
    if isinstance(column, CachedTensorList):
        return set(column.dtypes)
    return {None if tensor is None else tensor.dtype for tensor in column}


def _kind(columns: Sequence[Sequence[Tensor | None] | None], index: int) -> Kind:
    dtypes = [_dtype(column, index) for column in columns]
    return Kind(*dtypes)  # type: ignore[arg-type]  # there always is a gradient


def _dtype(column: Sequence[Tensor | None] | None, index: int) -> torch.dtype | None:
    tensor = None if column is None else column[index]
    return None if tensor is None else tensor.dtype


def _supported(kind: Kind, lists: TensorLists, moments: tuple[str, ...]) -> Kind | None:
    """The kind, if there are kernels for it, and scales and seeds are as they expect them."""
    dtypes = zip(moments, (kind.moment1, kind.moment2), strict=False)
    scaled = all(
        (scale_key(name) in lists.state) == (dtype is not None and is_blocked(dtype))
        for name, dtype in dtypes
    )
    seeds = {item.seed for item in lists.noise or []}
    rounds = kind.average != torch.bfloat16 or lists.noise is not None
    fits = kind.is_supported and scaled and rounds
    return kind if fits and len(seeds) <= 1 else None


# -- whether they fit each other ------------------------------------------------------------------


def check_fit(kind: Kind, columns: Mapping[str, CachedTensorList]) -> None:
    """Kernels read and write as many elements as they are told, wherever they are told. So each
    list is looked at when its addresses are first used, whatever was thought of it before.

    Args:
        columns: by the names of :class:`Kind`, ``scale1`` and ``scale2``, and each of them with
            ``from_`` before it where present values lie elsewhere.

    Raises:
        ValueError: a tensor has not the elements or the dtype that the others of its slot ask for,
            or its storage is smaller than it. Nothing was written.
    """
    sized = columns.get("main") or columns["grad"]
    numbers = sized.sizes.tobytes()
    for name, tensors in columns.items():
        dtype, expected = _form(kind, name.removeprefix("from_"), numbers)
        fits = tensors.own_sizes == expected and tensors.dtypes <= {dtype}
        if not fits or not tensors.stored:
            raise ValueError(_misfit(name, tensors, expected, dtype))


def _form(kind: Kind, name: str, numbers: bytes) -> tuple[torch.dtype, array[int]]:
    """Dtype of a column, and elements of each of its tensors."""
    if name.startswith("scale"):
        return torch.float32, _sizes(numbers, "blocks")
    dtype: torch.dtype = getattr(kind, name)
    is_packed = name == "moment1" and dtype == torch.uint8
    return dtype, _sizes(numbers, "packed" if is_packed else "")


@lru_cache(maxsize=64)
def _sizes(numbers: bytes, form: str) -> array[int]:
    sizes = array("q", numbers)
    if form:
        each = blocks_of if form == "blocks" else packed_bytes
        return array("q", map(each, sizes))
    return sizes


def _misfit(
    name: str, tensors: Sequence[Tensor], expected: Sequence[int], dtype: torch.dtype
) -> str:
    """The first of the tensors that is another one than the kernels were to be told."""
    for place, (tensor, size) in enumerate(zip(tensors, expected, strict=False)):
        held = tensor.untyped_storage().nbytes()
        is_misfit = (tensor.numel(), tensor.dtype) != (size, dtype)
        if is_misfit or held < tensor.nbytes:
            return (
                f"tensor {place} of {len(tensors)} in column {name!r} of a kernel's call has "
                f"{tensor.numel()} elements of {tensor.dtype} in a storage of {held} bytes, where "
                f"its slot has {size} of {dtype}: it was given other memory or another form "
                "(`tensor.data = ...`, `resize_`) that the optimizer was not told of, or its "
                "parameter was; nothing was written. Put a new parameter into the param group, or "
                "build the optimizer anew"
            )
    return f"column {name!r} of a kernel's call has {len(tensors)} tensors for {len(expected)}"
