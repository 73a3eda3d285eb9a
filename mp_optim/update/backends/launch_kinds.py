"""Which tensors go into one launch: those that share the dtypes of all their parts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.slots import CachedTensorList
from mp_optim.slots.state_keys import AVERAGE, REMAINDER, scale_key
from mp_optim.update.codecs import is_blocked
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
