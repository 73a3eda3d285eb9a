"""Muon (Jordan 2024) for matrices and stacks of them, with Adam or Lion for the rest. Formulas:
docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.muon import (
    COEFFICIENT_TYPES,
    MATMUL_PRECISIONS,
    SCALAR_OPTIMIZERS,
    SCALE_MODES,
    TP_MODES,
    coefficients,
    scale_factor,
)
from mp_optim.config.rules import RULES
from mp_optim.config.setting_checks import (
    FRACTION,
    POSITIVE,
    WHOLE,
    check_adam_settings,
    check_flags,
    check_range,
    check_setting,
)
from mp_optim.slots import SlotUpdate, SlotUpdates
from mp_optim.slots.state_keys import REMAINDER, scale_key
from mp_optim.slots.tensor_layout import Layout
from mp_optim.update.backends import Backend
from mp_optim.update.backends.interface import step_with
from mp_optim.update.chunking import piece_elements
from mp_optim.update.codecs import Noise, decode, encode_, join, split_
from mp_optim.update.kernel_args import TensorLists, fp32
from mp_optim.update.newton_schulz import orthogonalize
from mp_optim.update.rule import RuleOptimizer
from mp_optim.update.state_format import StatePrecision

(MOMENTUM,) = RULES["muon"].moment_names
_CHOICES = {
    "coefficient_type": COEFFICIENT_TYPES,
    "scale_mode": SCALE_MODES,
    "fp32_matmul_prec": MATMUL_PRECISIONS,
    "tp_mode": TP_MODES,
}
_DTYPES = {"medium": torch.bfloat16, "highest": torch.float32}


class Muon(RuleOptimizer):
    """Muon over FP32 matrices, shape (rows, columns), and stacks of them, shape (experts, rows,
    columns), with decoupled weight decay. Groups with ``optimizer="adam"`` or ``"lion"`` are
    stepped by that rule instead.

    The products of matrices are taken where the model's parameter lies, of the whole matrix,
    however it is split and wherever it is stepped.

    Args:
        momentum: of the exponential average of gradients.
        nesterov: orthogonalise the average one step ahead.
        num_ns_steps, coefficient_type: the Newton-Schulz iteration (see
            :mod:`mp_optim.config.muon`).
        scale_mode, extra_scale_factor: of the step.
        fp32_matmul_prec: ``medium`` for products in bfloat16, ``highest`` for FP32.
        tp_mode: ``duplicated`` gathers a matrix that is split over ranks, and each orthogonalises
            the whole; ``blockwise`` orthogonalises each part by itself.
        qkv_split_shapes: rows of the query, key and value part of each query group in a fused
            matrix, whose parts are orthogonalised by themselves; None for matrices that are one.
        betas, eps, bias_correction, adam_w_mode: of groups that are stepped by Adam or Lion.
        scalar_optimizer: which of these two; what ``backend`` has to have kernels for.
        **precision: fields of :class:`~mp_optim.update.state_format.StatePrecision`;
            ``exp_avg_dtype`` is the momentum's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        *,
        nesterov: bool = False,
        num_ns_steps: int = 5,
        coefficient_type: str = "quintic",
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        fp32_matmul_prec: str = "medium",
        tp_mode: str = "duplicated",
        qkv_split_shapes: tuple[int, ...] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        scalar_optimizer: str = "adam",
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        if scalar_optimizer not in SCALAR_OPTIMIZERS:
            raise ValueError(
                f"scalar_optimizer={scalar_optimizer!r}: must be one of {list(SCALAR_OPTIMIZERS)}"
            )
        self.rule = scalar_optimizer
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "num_ns_steps": num_ns_steps,
                "coefficient_type": coefficient_type,
                "scale_mode": scale_mode,
                "extra_scale_factor": extra_scale_factor,
                "fp32_matmul_prec": fp32_matmul_prec,
                "tp_mode": tp_mode,
                "qkv_split_shapes": qkv_split_shapes,
                "betas": betas,
                "eps": eps,
                "bias_correction": bias_correction,
                "adam_w_mode": adam_w_mode,
                "optimizer": "muon",
            },
            backend,
            StatePrecision(**precision),
        )

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return RULES[group["optimizer"]].moment_names

    def check_settings(self, group: dict[str, Any]) -> None:
        check_range(
            group,
            "optimizer",
            group["optimizer"] in ("muon", self.rule),
            f"'muon' or {self.rule!r}",
        )
        check_adam_settings(group)
        check_setting("momentum", group["momentum"], FRACTION)
        check_setting("extra_scale_factor", group["extra_scale_factor"], POSITIVE)
        check_setting("num_ns_steps", group["num_ns_steps"], WHOLE)
        check_flags(group, ("nesterov",))
        for name, choices in _CHOICES.items():
            check_range(group, name, group[name] in choices, f"one of {list(choices)}")
        coefficients(group["coefficient_type"], group["num_ns_steps"])
        if group["optimizer"] == "muon":
            _check_matrices(group)

    def is_collective(self, update: SlotUpdate) -> bool:
        group = self.param_groups[update.slot.group]
        return (
            group["optimizer"] == "muon"
            and group["tp_mode"] != "blockwise"
            and update.layout is not None
            and update.layout.splits_matrices
        )

    def group_backend(
        self, group: dict[str, Any], device: torch.device
    ) -> tuple[str, str]:
        if group["optimizer"] == "muon":
            return "torch", (
                "muon: products of matrices are torch's, where the model's parameters lie; their "
                "bits may "
                "differ between devices and numbers of threads"
            )
        return super().group_backend(group, device)

    def apply(
        self,
        backend: Backend,
        lists: TensorLists,
        group: dict[str, Any],
        step: int,
        multiplier: float | Tensor,
        updates: SlotUpdates,
    ) -> None:
        if group["optimizer"] != "muon":
            step_with(backend, group["optimizer"], lists, group, step, multiplier)
            return
        rule, lists = (
            _Rule.of(group),
            lists.in_place(),
        )  # kernels may read a source; this does not
        for index in range(len(lists.main)):
            _step(
                rule,
                _Matrices.of(lists, index),
                float(multiplier),
                updates[index].layout,
            )
        backend.average(lists)


def _check_matrices(group: Mapping[str, Any]) -> None:
    names = (
        group.get("param_names")
        or group.get("fqns")
        or [f"param{i}" for i in range(len(group["params"]))]
    )
    for name, param in zip(names, group["params"], strict=True):
        if param.dim() < 2:
            raise ValueError(
                f"{name} has shape {tuple(param.shape)}: muon steps matrices; put it into a group "
                "with "
                "optimizer='adam' or 'lion'"
            )


@dataclass(frozen=True)
class _Rule:
    """The settings of a group, scalars rounded once from double."""

    momentum: float
    nesterov: bool
    polynomials: tuple[tuple[float, float, float], ...]
    dtype: torch.dtype
    scale_mode: str
    lr: float
    decay: float
    blockwise: bool
    parts: tuple[int, ...] | None

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> _Rule:
        lr, momentum = float(group["lr"]), float(group["momentum"])
        return cls(
            momentum,
            group["nesterov"],
            coefficients(group["coefficient_type"], group["num_ns_steps"]),
            _DTYPES[group["fp32_matmul_prec"]],
            group["scale_mode"],
            lr * group["extra_scale_factor"],
            fp32(lr * float(group["weight_decay"])),
            group["tp_mode"] == "blockwise",
            group["qkv_split_shapes"],
        )


@dataclass(frozen=True)
class _Matrices:
    """What is stepped together: one parameter, on one device."""

    main: Tensor
    grad: Tensor
    momentum: Tensor
    scale: Tensor | None
    remainder: Tensor | None
    output: Tensor | None
    noise: Noise | None

    @classmethod
    def of(cls, lists: TensorLists, index: int) -> _Matrices:
        scales, remainders = (
            lists.state.get(scale_key(MOMENTUM)),
            lists.state.get(REMAINDER),
        )
        return cls(
            lists.main[index],
            lists.grad[index],
            lists.state[MOMENTUM][index],
            None if scales is None else scales[index],
            None if remainders is None else remainders[index],
            lists.output[index],
            None if lists.noise is None else lists.noise[index],
        )


def _step(rule: _Rule, at: _Matrices, multiplier: float, layout: Layout | None) -> None:
    direction = _orthogonal(
        rule, _averaged(rule, at, multiplier).view(at.main.shape), layout
    )
    main = at.main if at.remainder is None else join(at.main, at.remainder)
    if rule.decay != 0.0:
        main.sub_(main * rule.decay)
    main.sub_(direction)
    if at.remainder is not None:
        split_(main, at.main, at.remainder, at.noise)
    if at.output is not None:
        at.output.copy_(at.main)


def _averaged(rule: _Rule, at: _Matrices, multiplier: float) -> Tensor:
    """Update the momentum; returns what is to be orthogonalised, FP32, shape (n,)."""
    grad = at.grad.reshape(-1).float()
    if multiplier != 1.0:
        grad = grad * multiplier
    momentum = decode(at.momentum.view(-1), at.scale, second=False)
    _blend(momentum, grad, 1 - rule.momentum, out=momentum)
    encode_(momentum, at.momentum.view(-1), at.scale, second=False, noise=at.noise)
    return (
        _blend(grad, momentum, rule.momentum, out=torch.empty_like(grad))
        if rule.nesterov
        else momentum
    )


def _blend(start: Tensor, end: Tensor, weight: float, out: Tensor) -> Tensor:
    """start + (end - start) * weight as ``torch.lerp`` takes it, with one rounding for product and
    sum.

    Through FP64, in which the product is exact: a fused multiply-add, on devices and where there is
    none. What is orthogonalised is rounded to bfloat16, which makes much of a last bit.
    """
    near_end = weight >= 0.5
    factor = fp32(fp32(weight) - 1.0) if near_end else fp32(weight)
    piece = piece_elements(out.device)
    for at in range(0, out.numel(), piece):
        left, right = start[at : at + piece], end[at : at + piece]
        base = right if near_end else left
        out[at : at + piece] = torch.add(
            base.double(), (right - left).double(), alpha=factor
        )
    return out


def _orthogonal(rule: _Rule, local: Tensor, layout: Layout | None) -> Tensor:
    """The step of this rank's part, FP32, on its device. Collective if the matrices are split over
    ranks."""
    split = layout is not None and layout.splits_matrices and not rule.blockwise
    rounded = local.to(rule.dtype)
    if layout is None:
        return _scaled(rule, rounded)
    if not split:
        return _scaled(rule, rounded.to(layout.device)).to(local.device)
    return layout.own(_scaled(rule, layout.gather(rounded))).to(local.device)


def _scaled(rule: _Rule, whole: Tensor) -> Tensor:
    """Each matrix orthogonalised, part by part where it is several in one, and scaled; FP32."""
    if not whole.numel():
        return whole.float()
    if rule.parts is None:
        return _part(rule, whole)
    rows, columns = whole.shape[-2:]
    size = sum(rule.parts)
    if rows % size:
        raise ValueError(
            f"qkv_split_shapes={rule.parts}: {rows} rows are not a multiple of their sum {size}"
        )
    grouped = whole.reshape(*whole.shape[:-2], rows // size, size, columns)
    pieces = [
        _part(rule, piece.reshape(*whole.shape[:-2], -1, columns)).view(piece.shape)
        for piece in torch.split(grouped, list(rule.parts), dim=-2)
    ]
    return torch.cat(pieces, dim=-2).view(whole.shape)


def _part(rule: _Rule, whole: Tensor) -> Tensor:
    step = rule.lr * scale_factor(rule.scale_mode, *whole.shape[-2:])
    return orthogonalize(whole, rule.polynomials, rule.dtype).float().mul_(fp32(step))
