"""Which tensors go into one launch: those that share the dtypes of all their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.slots import CachedTensorList
from mp_optim.update.codecs import is_blocked
from mp_optim.update.kernel_args import REMAINDER, TensorLists, scale_key

__all__ = ["Kind", "Part", "parts_of"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAINS = ((torch.float32, None), (torch.bfloat16, torch.int16), (torch.bfloat16, torch.int8))


class Kind(NamedTuple):
    """Dtypes that the tensors of a launch share; None where there is no tensor."""

    grad: torch.dtype
    main: torch.dtype
    rest: torch.dtype | None
    moment1: torch.dtype | None
    moment2: torch.dtype | None
    output: torch.dtype | None

    @property
    def is_supported(self) -> bool:
        """Whether there are kernels for it."""
        return (
            self.grad in _FLOATS
            and (self.main, self.rest) in _MAINS
            and self.moment1 in (None, *_FLOATS, torch.int8)
            and self.moment2 in (None, *_FLOATS, torch.uint8)
            and self.output in (None, *_FLOATS)
        )


class Part(NamedTuple):
    """Tensors of one kind: where they are in the lists, and the lists of them alone. A kind of
    None: no kernel."""

    indices: Sequence[int]
    kind: Kind | None
    lists: TensorLists


def parts_of(lists: TensorLists, moments: tuple[str, ...]) -> list[Part]:
    """The lists by kind; the lists themselves if all tensors are of one."""
    if not lists.main:
        return []
    names = [*moments, None, None][:2]
    columns: list[Sequence[Tensor | None] | None] = [
        lists.grad,
        lists.main,
        lists.state.get(REMAINDER),
        *(None if name is None else lists.state[name] for name in names),
        lists.output,
    ]
    found = [_dtypes(column) for column in columns]
    if all(len(dtypes) == 1 for dtypes in found):
        kind = Kind(*(next(iter(dtypes)) for dtypes in found))  # type: ignore[arg-type]  # grad and main are lists
        return [Part(range(len(lists.main)), _supported(kind, lists, moments), lists)]
    rows = [Kind(*(_dtype(column, at) for column in columns)) for at in range(len(lists.main))]  # type: ignore[arg-type]
    parts = []
    for kind in dict.fromkeys(rows):
        indices = [at for at, other in enumerate(rows) if other == kind]
        part = _take(lists, indices)
        parts.append(Part(indices, _supported(kind, part, moments), part))
    return parts


def _dtypes(column: Sequence[Tensor | None] | None) -> set[torch.dtype | None]:
    if column is None:
        return {None}
    if isinstance(column, CachedTensorList):
        return set(column.dtypes)
    return {None if tensor is None else tensor.dtype for tensor in column}


def _dtype(column: Sequence[Tensor | None] | None, at: int) -> torch.dtype | None:
    tensor = None if column is None else column[at]
    return None if tensor is None else tensor.dtype


def _supported(kind: Kind, lists: TensorLists, moments: tuple[str, ...]) -> Kind | None:
    """The kind, if there are kernels for it and the scales and random numbers are as they expect
    them."""
    dtypes = zip(moments, (kind.moment1, kind.moment2), strict=False)
    scaled = all(
        (scale_key(name) in lists.state) == (dtype is not None and is_blocked(dtype))
        for name, dtype in dtypes
    )
    noise = lists.noise or []
    alike = len({item.seed for item in noise}) <= 1 and not any(item.start for item in noise)
    return kind if kind.is_supported and scaled and alike else None


def _take(lists: TensorLists, indices: Sequence[int]) -> TensorLists:
    def some(values: Sequence[Any]) -> list[Any]:
        return [values[index] for index in indices]

    return TensorLists(
        some(lists.main),
        some(lists.grad),
        {key: some(found) for key, found in lists.state.items()},
        some(lists.output),
        None if lists.noise is None else some(lists.noise),
    )
