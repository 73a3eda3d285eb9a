"""Adafactor (Shazeer & Stern 2018), with the settings of ``torch.optim.Adafactor``. Formulas:
docs/numerics.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.setting_checks import NOT_NEGATIVE, check_setting
from mp_optim.slots import SlotUpdate
from mp_optim.slots.slot_state import REMAINDER
from mp_optim.slots.tensor_layout import Part
from mp_optim.update.backends import Backend
from mp_optim.update.backends.adafactor_passes import (
    Averages,
    ElementPasses,
    NativeElementPasses,
    average,
)
from mp_optim.update.backends.native import NativeBackend
from mp_optim.update.chunking import runs_of
from mp_optim.update.codecs import join, split_
from mp_optim.update.exact_sums import (
    Block,
    MatricesShape,
    blocks_of,
    digits_to_values,
    matrices_shape,
    over_shards,
)
from mp_optim.update.kernel_args import TensorLists, fp32
from mp_optim.update.optimizer import RuleOptimizer
from mp_optim.update.rule import Launch, Rule, Settings, Workspace
from mp_optim.update.sums import sum_in_pairs

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
        lists, parts = launch.lists.in_place(), launch.parts
        passes = ElementPasses()
        if isinstance(backend, NativeBackend):
            passes = NativeElementPasses(backend.library)
        scalars = _Scalars.at(launch.settings, launch.step)
        multiplier, shard_groups = float(launch.multiplier), launch.updates.shard_groups
        for members in runs_of(enumerate(part.shape.numel() for part in parts), _TOGETHER):
            params = [_Param.of(lists, at, parts[at], multiplier) for at in members]
            _step(passes, params, scalars, [shard_groups[at] for at in members])
            for at, param in zip(members, params, strict=True):
                _store(lists, at, param)
        backend.average(lists)


class Adafactor(RuleOptimizer):
    """Adafactor over FP32 tensors, wherever they lie and however they are split. Of a parameter of
    two or more dimensions it keeps a sum for each row and column instead of a second moment.

    Args:
        lr: upper limit of the relative step, which is ``1 / sqrt(t)`` at step ``t``.
        beta2_decay: exponent of the weight ``t ** beta2_decay`` of a gradient in the averages.
        eps: floor of the second moment's root (None: FP32's epsilon), and of a parameter's root
            mean square.
        d: limit of the direction's root mean square.
        **precision: fields of :class:`~mp_optim.update.state_format.StatePrecision`; moments are
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
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
        }
        super().__init__(AdafactorRule(), params, settings, backend, precision)


@dataclass(frozen=True)
class _Scalars:
    """Scalars of a step; those named ``fp32`` are rounded to it once."""

    averages: Averages
    decay_fp32: float
    rate: float
    least_scale: float
    threshold: float

    @classmethod
    def at(cls, group: Mapping[str, Any], step: int) -> _Scalars:
        lr = float(group["lr"])
        return cls(
            averages=Averages.at(group, step),
            decay_fp32=fp32(lr * float(group["weight_decay"])),
            rate=min(lr, 1.0 / math.sqrt(step)),
            least_scale=float(group["eps"][1]),
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

    part: Part
    main: Tensor
    direction: Tensor
    state: dict[str, Tensor]
    shape: MatricesShape
    blocks: list[Block] = field(default_factory=list)

    @classmethod
    def of(cls, lists: TensorLists, at: int, part: Part, multiplier: float) -> _Param:
        state = {key: tensors[at] for key, tensors in lists.state.items()}
        main = lists.main[at]
        if REMAINDER in state:
            main = join(main, state[REMAINDER])
        grad = lists.grad[at].to(torch.float32, copy=True)
        if multiplier != 1.0:
            grad.mul_(multiplier)
        return cls(part, main, grad, state, matrices_shape(part.shape), blocks_of(part, grad))

    @property
    def device(self) -> torch.device:
        return self.main.device

    @property
    def is_factored(self) -> bool:
        return "row_var" in self.state

    def rms(self, digits: Tensor, top: float) -> float:
        """Root mean square over the whole parameter."""
        count = max(1, self.part.shape.numel())
        return math.sqrt(float(digits_to_values(digits, top)) / count)


def _step(
    passes: ElementPasses, params: list[_Param], scalars: _Scalars, shard_groups: Sequence[Any]
) -> None:
    """Step parameters that are stepped together; collective if some are split over ranks."""

    def reduced(values: list[Tensor], largest_of: bool) -> list[Tensor]:
        return over_shards(values, shard_groups, largest_of, "adding up Adafactor's sums")

    def tops_of(values: list[Tensor]) -> list[list[float]]:
        return [top.tolist() for top in reduced(values, largest_of=True)]

    largest = [[passes.largest(p.direction), passes.largest(p.main)] for p in params]
    tops = tops_of([torch.stack(each) for each in largest])
    sums = [_digits_of(passes, p, *top) for p, top in zip(params, tops, strict=True)]
    sums = reduced(sums, largest_of=False)
    scales = []
    for param, digits, (grad_top, main_top) in zip(params, sums, tops, strict=True):
        scales.append(param.rms(digits[:2], main_top))
        _turn(passes, param, digits[2:], grad_top, scalars.averages)
    tops = tops_of([passes.largest(p.direction)[None] for p in params])
    sums = [
        passes.total_digits(p.blocks, top, p.device) for p, (top,) in zip(params, tops, strict=True)
    ]
    sums = reduced(sums, largest_of=False)
    for param, digits, (top,), scale in zip(params, sums, tops, scales, strict=True):
        size = scalars.step_size(scale, param.rms(digits, top))
        passes.descend(param.main, param.direction, scalars.decay_fp32, size)


def _digits_of(passes: ElementPasses, param: _Param, grad_top: float, main_top: float) -> Tensor:
    """Digits of the sum of squares of the parameter, and of the gradient's rows and columns where
    they are kept; int64, shape (n,)."""
    mains = blocks_of(param.part, param.main)
    digits = [passes.total_digits(mains, main_top, param.device)]
    if param.is_factored:
        digits += passes.row_and_column_digits(param.blocks, grad_top, param.shape, param.device)
    return torch.cat([each.reshape(-1) for each in digits])


def _turn(
    passes: ElementPasses, param: _Param, digits: Tensor, top: float, scalars: Averages
) -> None:
    """Update the moments, and turn the gradient into the direction."""
    if param.is_factored:
        _turn_factored(passes, param, digits, top, scalars)
    else:
        passes.turn_by_variance(param.direction, param.state["variance"], scalars)


def _turn_factored(
    passes: ElementPasses, param: _Param, digits: Tensor, top: float, scalars: Averages
) -> None:
    matrices, rows, columns = param.shape
    by_row, by_column = torch.split(digits, [2 * matrices * rows, 2 * matrices * columns])
    row_var = param.state["row_var"].view(matrices, rows)
    column_var = param.state["col_var"].view(matrices, columns)
    if not row_var.numel() or not column_var.numel():
        return
    # NOTE: a GPU's division by a number is a product with its reciprocal, which has other bits.
    row_count, column_count = (digits.new_full((), n, dtype=torch.float64) for n in (rows, columns))
    row_sums = digits_to_values(by_row.view(2, matrices, rows), top)
    average(row_var, row_sums.div_(column_count).float(), scalars)
    column_sums = digits_to_values(by_column.view(2, matrices, columns), top)
    average(column_var, column_sums.div_(row_count).float(), scalars)
    means = sum_in_pairs(row_var.double()).div_(row_count).float()
    weights = row_var / means.clamp_(min=scalars.floor)[:, None]
    passes.turn_by_matrices(param.blocks, weights, column_var, scalars)


def _store(lists: TensorLists, at: int, param: _Param) -> None:
    if REMAINDER in param.state:
        noise = None if lists.noise is None else lists.noise[at]
        split_(param.main, lists.main[at], param.state[REMAINDER], noise)
    output = lists.output[at]
    if output is not None:
        output.copy_(lists.main[at].view(output.shape))
