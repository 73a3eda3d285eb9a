"""Parameters that no step can be right for: some elements of them are one memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from mp_optim.slots.tensors import are_plain, held_tensor

_Span = tuple[str, int, int, str, Tensor]


def check_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters whose elements share memory, with each other or with another parameter's.

    Raises:
        ValueError: there are some, naming them.
    """
    spans: list[_Span] = []
    for name, param in named:
        local = held_tensor(param)
        if local.is_meta or not are_plain([local]) or not local.numel():
            continue
        if not local.is_contiguous() and _is_expanded(local):
            raise ValueError(
                f"{name} has shape {tuple(local.shape)} and strides {local.stride()}: several of "
                "its elements are one memory (expand), so a step has no single value for them; "
                "make it with .contiguous() or .clone(), or train what it was expanded from"
            )
        first = local.data_ptr()
        end = first + (_last(local) + 1) * local.itemsize
        spans.append((str(local.device), first, end, name, local))
    spans.sort(key=lambda span: span[:3])
    for one, other in itertools.pairwise(spans):
        # Without a neighbour that overlaps there is no pair at all.
        if one[0] == other[0] and other[1] < one[2]:
            _check_pairs(spans)
            return


def _check_pairs(spans: list[_Span]) -> None:
    for index, (device, _, end, name, tensor) in enumerate(spans):
        later = itertools.islice(spans, index + 1, None)
        for there, start, _, other, another in later:
            if there != device or start >= end:
                break
            if _meet(tensor, another):
                raise ValueError(
                    f"{name} and {other} are two parameters that share memory, which two states "
                    "would step against each other; tie them by using one Parameter in both "
                    "modules"
                )


def _last(tensor: Tensor) -> int:
    """How far the last element is from the first, in elements."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * step for size, step in extents)


def _is_expanded(tensor: Tensor) -> bool:
    reach = 0
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    for step, size in sorted(side for side in sides if side[1] > 1):
        if step <= reach:  # it may be: torch.as_strided can interlock rows
            different = torch.unique(_places(tensor)).numel()
            return bool(different < tensor.numel())
        reach += (size - 1) * step
    return False


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors whose memory overlaps have an element in common: columns of one matrix
    have none."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    theirs = torch.isin(_addresses(one), _addresses(other))
    return bool(theirs.any())


def _addresses(tensor: Tensor) -> Tensor:
    """The address of each element, in units of the parameter's elements."""
    return _places(tensor) + tensor.data_ptr() // tensor.itemsize


def _places(tensor: Tensor) -> Tensor:
    """How far each element is from the first, in elements."""
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        along = torch.arange(size, device="cpu") * step
        places = (places.unsqueeze(-1) + along).flatten()
    return places
