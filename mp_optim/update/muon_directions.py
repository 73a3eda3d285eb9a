"""Muon's products of matrices: from rounded momenta to directions, of whole matrices and of such
that are split over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.config.muon import coefficients, scale_factor
from mp_optim.slots.tensor_layout import Layout
from mp_optim.update.kernel_args import fp32
from mp_optim.update.newton_schulz import orthogonalize_each

_DTYPES = {"medium": torch.bfloat16, "highest": torch.float32}
_TOGETHER = 1 << 26
"""Elements of whole parameters that are orthogonalised together: each needs its rounded momentum
and its direction meanwhile."""


class Direction(NamedTuple):
    """What is subtracted from a parameter: ``fp32(values) * factor``, rounded once.

    Attributes:
        values: the parameter's shape, bfloat16 or float32, contiguous, on its device.
        factor: an FP32 number.
    """

    values: Tensor
    factor: float


@dataclass(frozen=True)
class Orthogonalization:
    """The settings of a group that say how its matrices are orthogonalised and scaled.

    Attributes:
        polynomials, method: the Newton-Schulz steps, and how they are taken.
        dtype: of the products.
        scale_mode, lr: what a direction is multiplied with; ``lr`` has the extra factor in it.
        blockwise: whether a rank's part is a matrix of its own.
        parts: rows of the parts of each query group of a fused matrix; None if it is one.
        head_rows: rows of each head, which is a matrix of its own; None if there are none.
    """

    polynomials: tuple[tuple[float, float, float], ...]
    method: str
    dtype: torch.dtype
    scale_mode: str
    lr: float
    blockwise: bool
    parts: tuple[int, ...] | None
    head_rows: int | None

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Orthogonalization:
        """From a param group."""
        return cls(
            coefficients(group["coefficient_type"], group["num_ns_steps"]),
            group["ns_method"],
            _DTYPES[group["fp32_matmul_prec"]],
            group["scale_mode"],
            float(group["lr"]) * group["extra_scale_factor"],
            group["tp_mode"] == "blockwise",
            None if group["head_rows"] else group["qkv_split_shapes"],
            group["head_rows"],
        )

    def factor(self, rows: int, columns: int) -> float:
        """What an orthogonal matrix of this shape is multiplied with; an FP32 number."""
        return fp32(self.lr * scale_factor(self.scale_mode, rows, columns))


def runs(
    params: Sequence[Tensor], layouts: Sequence[Layout | None]
) -> Iterator[list[int]]:
    """Which parameters are orthogonalised together: the same on every rank that has a part of
    them, as it depends on whole shapes. ``layouts`` may be empty."""
    members: list[int] = []
    room = _TOGETHER
    for index, param in enumerate(params):
        layout = layouts[index] if layouts else None
        shape = param.shape if layout is None or layout.mesh is None else layout.shape
        size = math.prod(shape)
        if members and size > room:
            yield members
            members, room = [], _TOGETHER
        members.append(index)
        room -= size
    if members:
        yield members


def directions(
    rule: Orthogonalization, rounded: Sequence[Tensor], layouts: Sequence[Layout | None]
) -> list[Direction]:
    """The direction of each parameter of a run, for this rank's part of it. Collective if some are
    split over ranks.

    Args:
        rounded: momenta in ``rule.dtype``, of this rank's parts, contiguous, on the device they are
            stepped on; overwritten.
        layouts: of the model's parameters, where the products are taken; as many.
    """
    wholes = [
        _whole(rule, part, layout)
        for part, layout in zip(rounded, layouts, strict=True)
    ]
    done: dict[int, Direction] = {}
    for device in dict.fromkeys(whole.device for whole in wholes):
        there = [index for index, whole in enumerate(wholes) if whole.device == device]
        found = whole_directions(rule, [wholes[index] for index in there])
        for index, (values, factor) in zip(there, found, strict=True):
            layout = layouts[index]
            if layout is not None and _is_gathered(rule, layout):
                values = layout.own(values)
            done[index] = Direction(values.to(rounded[index].device), factor)
    return [done[index] for index in range(len(wholes))]


def _whole(rule: Orthogonalization, part: Tensor, layout: Layout | None) -> Tensor:
    """What this rank orthogonalises of a parameter, where its products are taken."""
    if layout is None:
        return part
    return layout.gather(part) if _is_gathered(rule, layout) else part.to(layout.device)


def _is_gathered(rule: Orthogonalization, layout: Layout) -> bool:
    return layout.splits_matrices and not rule.blockwise


def whole_directions(
    rule: Orthogonalization, wholes: Sequence[Tensor]
) -> list[Direction]:
    """The directions of whole matrices and stacks of them, where they lie; nothing is sent.

    Args:
        wholes: contiguous, in ``rule.dtype``, on one device; overwritten.
    """
    if rule.head_rows is not None:
        return _by_heads(rule, wholes, rule.head_rows)
    if rule.parts is not None:
        return _by_parts(rule, wholes, rule.parts)
    found = orthogonalize_each(wholes, rule.polynomials, rule.method)
    return [Direction(each, rule.factor(*each.shape[-2:])) for each in found]


def _by_heads(
    rule: Orthogonalization, wholes: Sequence[Tensor], rows: int
) -> list[Direction]:
    """Of attention weights, each head by itself, with the scale of its shape: also of fused ones,
    whose parts are whole heads one after the other."""
    for whole in wholes:
        if whole.size(-2) % rows:
            raise ValueError(
                f"head_rows={rows}: {whole.size(-2)} rows are not a multiple of it"
            )
    heads = [whole.view(-1, rows, whole.size(-1)) for whole in wholes]
    found = orthogonalize_each(heads, rule.polynomials, rule.method)
    return [
        Direction(values.view(whole.shape), rule.factor(rows, whole.size(-1)))
        for values, whole in zip(found, wholes, strict=True)
    ]


def _by_parts(
    rule: Orthogonalization, wholes: Sequence[Tensor], parts: tuple[int, ...]
) -> list[Direction]:
    """Of fused matrices, each part by itself; scaled already, and FP32."""
    pieces, targets = [], []
    results = [torch.empty_like(whole, dtype=torch.float32) for whole in wholes]
    for whole, result in zip(wholes, results, strict=True):
        for piece, target in zip(_cut(whole, parts), _cut(result, parts), strict=True):
            *stack, groups, rows, columns = piece.shape
            pieces.append(piece.reshape(*stack, groups * rows, columns).contiguous())
            targets.append(target)
    found = orthogonalize_each(pieces, rule.polynomials, rule.method)
    for values, target in zip(found, targets, strict=True):
        target.copy_(values.view(target.shape)).mul_(rule.factor(*values.shape[-2:]))
    return [Direction(result, 1.0) for result in results]


def _cut(fused: Tensor, parts: tuple[int, ...]) -> Sequence[Tensor]:
    """Views of the parts of fused matrices, shape (..., groups, rows, columns)."""
    (*stack, rows, columns), size = fused.shape, sum(parts)
    if rows % size:
        raise ValueError(
            f"qkv_split_shapes={parts}: {rows} rows are not a multiple of their sum {size}"
        )
    grouped = fused.view(*stack, rows // size, size, columns)
    return torch.split(grouped, list(parts), dim=-2)
