"""Adafactor (Shazeer & Stern 2018), with the settings of ``torch.optim.Adafactor``. Formulas:
docs/numerics.md."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.setting_checks import NOT_NEGATIVE, check_setting
from mp_optim.core import SlotUpdate
from mp_optim.core.slot_state import REMAINDER
from mp_optim.core.tensor_layout import ShardRegion
from mp_optim.host.calls import tell_autograd
from mp_optim.kernels import Backend
from mp_optim.kernels.chunking import runs_of
from mp_optim.kernels.codecs import join, split_
from mp_optim.kernels.kernel_args import TensorLists, fp32
from mp_optim.kernels.native import NativeBackend
from mp_optim.kernels.native_library import Adafactor as AdafactorValues
from mp_optim.kernels.native_library import Matrices, NativeLibrary, thread_count
from mp_optim.kernels.sums import (
    MatricesShape,
    MatrixBlock,
    digits_of,
    digits_to_values,
    matrices_shape,
    matrix_blocks,
    over_shards,
    pieces_of,
    sum_in_pairs,
)
from mp_optim.rules.rule import Launch, Rule, Settings, Workspace
from mp_optim.rules.rule_optimizer import RuleOptimizer

_LARGEST = torch.finfo(torch.float32).max
_TOGETHER = 1 << 26
"""Elements of whole parameters that are stepped together: each needs FP32 copies of its gradient
and its direction meanwhile."""


class AdafactorRule(Rule):
    """Adafactor. Of a parameter of two or more dimensions it keeps a sum for each row and column
    instead of a second moment."""

    name = "adafactor"

    def is_collective(self, group: Settings, update: SlotUpdate) -> bool:
        return bool(update.shard_groups)

    def check_settings(self, group: Settings) -> None:
        super().check_settings(group)
        eps = group["eps"]
        if eps[0] is not None:
            check_setting("eps[0]", eps[0], NOT_NEGATIVE)
        check_setting("eps[1]", eps[1], NOT_NEGATIVE)

    def carried_out_by(
        self, backend: Backend, why: str, group: Settings, workspace: Workspace
    ) -> tuple[str, str]:
        if isinstance(backend, NativeBackend):
            return backend.name, why
        return "torch", "adafactor: torch operations, with the same bits in every place"

    def apply(self, launch: Launch, backend: Backend) -> None:
        lists, regions = launch.lists.in_place(), launch.regions
        passes = passes_by(backend)
        scalars = _Scalars.at(launch.settings, launch.step)
        multiplier, shard_groups = float(launch.factor), launch.updates.shard_groups
        for members in runs_of(enumerate(region.shape.numel() for region in regions), _TOGETHER):
            params = [_Param.of(lists, at, regions[at], multiplier) for at in members]
            _step(passes, params, scalars, [shard_groups[at] for at in members])
            for at, param in zip(members, params, strict=True):
                main, output = lists.main[at], lists.output[at]
                if main.dtype != torch.float32:
                    noise = None if lists.noise is None else lists.noise[at]
                    split_(param.main, main, param.state.get(REMAINDER), noise)
                if output is not None:
                    output.copy_(main.view(output.shape))
        backend.average(lists)


class FusedAdafactor(RuleOptimizer):
    """Adafactor over FP32 tensors, wherever they lie and however they are split. Of a parameter of
    two or more dimensions it keeps a sum for each row and column instead of a second moment.

    Args:
        lr: upper limit of the relative step, which is ``1 / sqrt(t)`` at step ``t``.
        beta2_decay: exponent of the weight ``t ** beta2_decay`` of a gradient in the averages.
        eps: floor of the second moment's root (None: FP32's epsilon), and of a parameter's root
            mean square.
        d: limit of the direction's root mean square.
        **precision: fields of :class:`~mp_optim.kernels.state_format.StatePrecision`; moments are
            FP32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
        }
        super().__init__(AdafactorRule(), params, settings, backend, precision)


@dataclass(frozen=True)
class _Scalars:
    """Scalars of a step: those of the moments and ``decay`` are rounded to FP32 once."""

    keep: float
    weight: float
    floor: float
    squared_floor: float
    decay: float
    rate: float
    least_scale: float
    threshold: float

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> _Scalars:
        """From a param group, at step ``step`` >= 1."""
        lr, (floor, least_scale) = float(group["lr"]), group["eps"]
        floor = torch.finfo(torch.float32).eps if floor is None else float(floor)
        weight = step ** float(group["beta2_decay"])
        return cls(
            keep=fp32(1.0 - weight),
            weight=fp32(weight),
            floor=fp32(floor),
            squared_floor=fp32(floor * floor),
            decay=fp32(lr * float(group["weight_decay"])),
            rate=min(lr, 1.0 / math.sqrt(step)),
            least_scale=float(least_scale),
            threshold=float(group["d"]),
        )

    def step_size(self, param_rms: float, direction_rms: float) -> float:
        """What the direction is multiplied with; NaN if a root mean square is."""
        clip = direction_rms / self.threshold
        scale = param_rms if not param_rms < self.least_scale else self.least_scale
        return fp32(scale * self.rate / (clip if not clip < 1.0 else 1.0))


@dataclass
class _Param:
    """A parameter under way: FP32 copies of what this rank has of it.

    Attributes:
        main: the main param itself where that is FP32.
        direction: the gradient; later what the parameter moves along.
        state: moments by name.
    """

    region: ShardRegion
    main: Tensor
    direction: Tensor
    state: dict[str, Tensor]
    shape: MatricesShape
    blocks: list[MatrixBlock] = field(default_factory=list)

    @classmethod
    def of(cls, lists: TensorLists, at: int, region: ShardRegion, multiplier: float) -> _Param:
        state = {key: tensors[at] for key, tensors in lists.state.items()}
        main = join(lists.main[at], state.get(REMAINDER))
        grad = lists.grad[at].to(torch.float32, copy=True)
        if multiplier != 1.0:
            grad.mul_(multiplier)
        return cls(
            region, main, grad, state, matrices_shape(region.shape), matrix_blocks(region, grad)
        )

    def rms(self, digits: Tensor, top: float) -> float:
        """Root mean square over the whole parameter."""
        count = max(1, self.region.shape.numel())
        return math.sqrt(float(digits_to_values(digits, top)) / count)


def _step(
    passes: ElementPasses, params: list[_Param], scalars: _Scalars, shard_groups: Sequence[Any]
) -> None:
    """Step parameters that are stepped together; collective if some are split over ranks."""

    def reduced(values: list[Tensor], largest_of: bool) -> list[Tensor]:
        return over_shards(values, shard_groups, largest_of, "adding up Adafactor's sums")

    largest = [torch.stack([passes.largest(p.direction), passes.largest(p.main)]) for p in params]
    tops = [top.tolist() for top in reduced(largest, largest_of=True)]
    sums = [_digits_of(passes, p, *top) for p, top in zip(params, tops, strict=True)]
    sums = reduced(sums, largest_of=False)
    scales = []
    for param, digits, (grad_top, main_top) in zip(params, sums, tops, strict=True):
        scales.append(param.rms(digits[:2], main_top))
        _turn(passes, param, digits[2:], grad_top, scalars)
    largest = [passes.largest(p.direction)[None] for p in params]
    tops = [top.tolist() for top in reduced(largest, largest_of=True)]
    sums = [
        passes.total_digits(p.blocks, top, p.main.device)
        for p, (top,) in zip(params, tops, strict=True)
    ]
    sums = reduced(sums, largest_of=False)
    for param, digits, (top,), scale in zip(params, sums, tops, scales, strict=True):
        size = scalars.step_size(scale, param.rms(digits, top))
        passes.descend(param.main, param.direction, scalars.decay, size)


def _digits_of(passes: ElementPasses, param: _Param, grad_top: float, main_top: float) -> Tensor:
    """Digits of the sum of squares of the parameter, and of the gradient's rows and columns where
    they are kept; int64, shape (n,)."""
    mains = matrix_blocks(param.region, param.main)
    digits = [passes.total_digits(mains, main_top, param.main.device)]
    if "row_var" in param.state:
        digits += passes.row_and_column_digits(
            param.blocks, grad_top, param.shape, param.main.device
        )
    return torch.cat([each.reshape(-1) for each in digits])


def _turn(
    passes: ElementPasses, param: _Param, digits: Tensor, top: float, scalars: _Scalars
) -> None:
    """Update the moments, and turn the gradient into the direction."""
    if "row_var" not in param.state:
        passes.turn_by_variance(param.direction, param.state["variance"], scalars)
        return
    matrices, rows, columns = param.shape
    by_row, by_column = torch.split(digits, [2 * matrices * rows, 2 * matrices * columns])
    row_var = param.state["row_var"].view(matrices, rows)
    column_var = param.state["col_var"].view(matrices, columns)
    if not row_var.numel() or not column_var.numel():
        return
    # NOTE: a GPU's division by a number is a product with its reciprocal, which has other bits.
    row_count, column_count = (digits.new_full((), n, dtype=torch.float64) for n in (rows, columns))
    row_sums = digits_to_values(by_row.view(2, matrices, rows), top)
    _average(row_var, row_sums.div_(column_count).float(), scalars)
    column_sums = digits_to_values(by_column.view(2, matrices, columns), top)
    _average(column_var, column_sums.div_(row_count).float(), scalars)
    means = sum_in_pairs(row_var.double()).div_(row_count).float()
    weights = row_var / means.clamp_(min=scalars.floor)[:, None]
    passes.turn_by_matrices(param.blocks, weights, column_var, scalars)


# -- passes over the elements ---------------------------------------------------------------------


def _average(moment: Tensor, value: Tensor, scalars: _Scalars) -> None:
    """Add a value to a moment; the value is spent. What overflows becomes FP32's largest number:
    of an infinite moment nothing could be decayed, nor a mean be taken."""
    value.clamp_(max=_LARGEST).mul_(scalars.weight)
    moment.mul_(scalars.keep).add_(value).clamp_(max=_LARGEST)


class ElementPasses:
    """Each method goes over contiguous FP32 elements once."""

    def largest(self, values: Tensor) -> Tensor:
        """The largest magnitude, FP32, shape (); inf if one is not finite, 0 if there is none."""
        if not values.numel():
            return torch.zeros((), dtype=torch.float32, device=values.device)
        low, high = torch.aminmax(values)
        top = torch.maximum(low.abs(), high.abs())
        return torch.where(top.isfinite(), top, torch.inf)

    def total_digits(
        self, blocks: Sequence[MatrixBlock], top: float, device: torch.device
    ) -> Tensor:
        """The sum of all squares in digits, int64, shape (2,). Those of several ranks may be added
        up.

        Args:
            top: the largest magnitude of the whole parameter; inf leaves the sum open.
        """
        total = torch.zeros(2, dtype=torch.int64, device=device)
        for block in blocks if math.isfinite(top) else ():
            for piece in pieces_of(block):
                digits = digits_of(piece.values, top)
                total += torch.stack([each.sum() for each in digits]).long()
        return total

    def row_and_column_digits(
        self, blocks: Sequence[MatrixBlock], top: float, shape: MatricesShape, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The sums of squares of each row and column of a stack of matrices, in digits.

        Returns:
            int64, shapes (2, matrices, rows) and (2, matrices, columns); 0 where this rank has
            nothing.
        """
        by_row, by_column = _no_digits(shape, device)
        for block in blocks if math.isfinite(top) else ():
            for values, matrix, row, column in pieces_of(block):
                deep, high, wide = values.shape
                for digit, digits in enumerate(digits_of(values, top)):
                    where = by_row[digit, matrix : matrix + deep, row : row + high]
                    where += digits.sum(2).long()
                    where = by_column[digit, matrix : matrix + deep, column : column + wide]
                    where += digits.sum(1).long()
        return by_row, by_column

    def turn_by_variance(self, grad: Tensor, variance: Tensor, scalars: _Scalars) -> None:
        """Update the variance, and turn the gradient into the direction."""
        _average(variance, grad * grad, scalars)
        grad.div_(_root(variance.clamp(min=scalars.squared_floor)))

    def turn_by_matrices(
        self, blocks: Sequence[MatrixBlock], weights: Tensor, columns: Tensor, scalars: _Scalars
    ) -> None:
        """Turn gradients into directions.

        Args:
            weights: of all rows, over the mean of their matrix; shape (matrices, rows).
            columns: moments of all columns, shape (matrices, columns).
        """
        for block in blocks:
            for values, matrix, row, column in pieces_of(block):
                deep, high, wide = values.shape
                of_rows = weights[matrix : matrix + deep, row : row + high, None]
                of_columns = columns[matrix : matrix + deep, None, column : column + wide]
                values.div_(_root((of_rows * of_columns).clamp_(min=scalars.squared_floor)))

    def descend(self, main: Tensor, direction: Tensor, decay: float, size: float) -> None:
        """Take the step; the direction is spent."""
        if decay != 0.0:
            main.sub_(main * decay)
        main.sub_(direction.mul_(size))


def _no_digits(shape: MatricesShape, device: torch.device) -> tuple[Tensor, Tensor]:
    matrices, rows, columns = shape
    by_row = torch.zeros(2, matrices, rows, dtype=torch.int64, device=device)
    return by_row, torch.zeros(2, matrices, columns, dtype=torch.int64, device=device)


def _root(values: Tensor) -> Tensor:
    """Square roots, rounded once from FP64."""
    return values.double().sqrt_().float()


# -- by the kernels, on all host threads ----------------------------------------------------------


class NativeElementPasses(ElementPasses):
    """Calls the library; bit for bit what the text in torch operations computes."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def largest(self, values: Tensor) -> Tensor:
        top = torch.zeros((), dtype=torch.float32, device="cpu")
        if values.numel():
            self._call("mp_largest", values.data_ptr(), values.numel(), top.data_ptr())
        return top

    def total_digits(
        self, blocks: Sequence[MatrixBlock], top: float, device: torch.device
    ) -> Tensor:
        total = torch.zeros(2, dtype=torch.int64, device=device)
        for block in blocks if math.isfinite(top) else ():
            values = block.values
            self._call(
                "mp_total_digits", values.data_ptr(), values.numel(), _scale(top), total.data_ptr()
            )
        return total

    def row_and_column_digits(
        self, blocks: Sequence[MatrixBlock], top: float, shape: MatricesShape, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        by_row, by_column = _no_digits(shape, device)
        for block in blocks if math.isfinite(top) else ():
            box, to = _matrices(block, shape), (by_row.data_ptr(), by_column.data_ptr())
            self._call("mp_matrix_digits", box, _scale(top), *to)
        return by_row, by_column

    def turn_by_variance(self, grad: Tensor, variance: Tensor, scalars: _Scalars) -> None:
        if grad.numel():
            _check_alike(grad, variance)
            values = AdafactorValues(scalars.keep, scalars.weight, scalars.squared_floor)
            to = (grad.data_ptr(), variance.data_ptr(), grad.numel())
            self._call("mp_turn_by_variance", *to, ctypes.byref(values))

    def turn_by_matrices(
        self, blocks: Sequence[MatrixBlock], weights: Tensor, columns: Tensor, scalars: _Scalars
    ) -> None:
        shape = (*weights.shape, columns.shape[1])
        moments = (weights.data_ptr(), columns.data_ptr(), scalars.squared_floor)
        for block in blocks:
            self._call("mp_turn_matrices", _matrices(block, shape), *moments)

    def descend(self, main: Tensor, direction: Tensor, decay: float, size: float) -> None:
        if main.numel():
            _check_alike(main, direction)
            tensors = (main.data_ptr(), direction.data_ptr(), main.numel())
            self._call("mp_descend", *tensors, decay, size)
            tell_autograd([main])

    def _call(self, name: str, *arguments: Any) -> None:
        self._library.call(name, *arguments, thread_count())


def passes_by(backend: Backend) -> ElementPasses:
    """As a backend has them."""
    if isinstance(backend, NativeBackend):
        return NativeElementPasses(backend.library)
    return ElementPasses()


def _check_alike(one: Tensor, other: Tensor) -> None:
    """Kernels go by the first of the two.

    Raises:
        ValueError: the other has not as many elements, or one is not FP32 without gaps.
    """
    forms = [(each.numel(), each.dtype, each.is_contiguous()) for each in (one, other)]
    if forms != [(one.numel(), torch.float32, True)] * 2:
        raise ValueError(
            f"Adafactor's kernels were to step {list(one.shape)} by {list(other.shape)}: a "
            "parameter, its gradient or its state was given other memory (`tensor.data = ...`) "
            "that the optimizer was not told of"
        )


def _scale(top: float) -> float:
    """The power of two that brings all magnitudes below 1."""
    return float(2.0 ** -math.frexp(top)[1])


def _matrices(block: MatrixBlock, shape: MatricesShape) -> Any:
    values = block.values
    return ctypes.byref(Matrices(values.data_ptr(), *values.shape, *block[1:], *shape))
