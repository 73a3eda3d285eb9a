"""Muon (Jordan 2024) for matrices and stacks of them, with Adam or Lion for the rest. Formulas:
docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.rules import SCALAR_OPTIMIZERS, coefficients
from mp_optim.core import SlotUpdate
from mp_optim.core.slot_state import AVERAGE, MOMENT2, REMAINDER, scale_key
from mp_optim.kernels import Backend
from mp_optim.kernels.element_rules import agreeing
from mp_optim.kernels.kernel_args import MAIN, MuonScalars, fp32
from mp_optim.kernels.reference import MOMENTUM
from mp_optim.muon.matrix_exchange import MatrixOwners
from mp_optim.muon.orthogonalization import (
    Direction,
    Orthogonalization,
    directions,
    normalized,
    runs,
    runs_of_wholes,
    whole_directions,
)
from mp_optim.rules.elementwise import AdamRule, LionRule, check_decoupled
from mp_optim.rules.rule import (
    CAUTION_REDUCTION,
    ElementRule,
    Launch,
    Rule,
    Settings,
    Workspace,
    add_up_parts,
    parts_over,
)
from mp_optim.rules.rule_optimizer import RuleOptimizer

_SCALARS: dict[str, ElementRule] = {"adam": AdamRule(), "lion": LionRule()}


class MuonRule(Rule):
    """Muon for groups of matrices with ``optimizer="muon"``, and a scalar rule for the others.

    Args:
        scalar: of these.
    """

    name = "muon"

    def __init__(self, scalar: ElementRule) -> None:
        self._scalar = scalar

    @property
    def kernels(self) -> str:
        return self._scalar.name

    def moments(self, group: Settings) -> tuple[str, ...]:
        if group["optimizer"] != "muon":
            return self._scalar.moments(group)
        return (MOMENTUM, MOMENT2) if group.get("moment2_method") else (MOMENTUM,)

    def deciding_setting(self, group: Settings) -> str:
        if group["optimizer"] != "muon":
            return self._scalar.deciding_setting(group)
        return "moment2_method"

    def unread_moments(self, group: Settings) -> tuple[str, ...]:
        return () if group["optimizer"] == "muon" else self._scalar.unread_moments(group)

    def reads_steps(self, group: Settings) -> bool:
        return group["optimizer"] != "muon" and self._scalar.reads_steps(group)

    def is_elementwise(self, group: Settings) -> bool:
        return group["optimizer"] != "muon" and self._scalar.is_elementwise(group)

    def check_settings(self, group: Settings) -> None:
        if group["optimizer"] not in ("muon", self._scalar.name):
            raise ValueError(
                f"optimizer={group['optimizer']!r}: must be 'muon' or {self._scalar.name!r}"
            )
        super().check_settings(group)
        if group["optimizer"] == "adam":
            check_decoupled(group)
        coefficients(group["coefficient_type"], group["num_ns_steps"])
        if group.get("moment2_method") and group["tp_mode"] == "blockwise":
            raise ValueError(
                f"moment2_method={group['moment2_method']!r}: is of rows of whole matrices; set "
                "tp_mode='duplicated'"
            )

    def check_shapes(self, group: Settings, shapes: Iterable[torch.Size]) -> None:
        if group["optimizer"] != "muon":
            return
        names = group.get("param_names") or group.get("fqns")
        for index, shape in enumerate(shapes):
            if len(shape) < 2:
                name = names[index] if names else f"param{index}"
                raise ValueError(
                    f"{name} has shape {tuple(shape)}: muon steps matrices; put it into a group "
                    "with optimizer='adam' or 'lion'"
                )

    def new_workspace(self) -> Workspace:
        return MatrixOwners()

    def is_collective(self, group: Settings, update: SlotUpdate) -> bool:
        counts = _adds_up(group) and parts_over(update.shard_groups, update.layout)
        return bool(counts) or _shares_matrices(group, update)

    def carried_out_by(
        self, backend: Backend, why: str, group: Settings, workspace: Workspace
    ) -> tuple[str, str]:
        if group["optimizer"] != "muon":
            return backend.name, why
        return backend.name, (
            f"{why}; muon: products of matrices are torch's, where the model's parameters lie; "
            f"their bits may differ between devices and numbers of threads{workspace}"
        )

    def apply(self, launch: Launch, backend: Backend) -> None:
        lists, group, multiplier = launch.lists, launch.settings, launch.factor
        if group["optimizer"] != "muon":
            self._scalar.apply(launch, backend)
            return
        owners, updates = launch.workspace, launch.updates
        assert isinstance(owners, MatrixOwners)
        multiplier = float(multiplier)
        if not lists.state.keys().isdisjoint((AVERAGE, MOMENT2)):  # which are read where they lie
            lists = lists.in_place()
        scalars, rule = MuonScalars.at(group), Orthogonalization.of(group)
        owners.begin(each.slot for each in updates if _shares_matrices(group, each))
        found = runs(lists.main, updates.layouts, rule.blockwise)
        for members, is_here in runs_of_wholes(launch.regions) if _adds_up(group) else found:
            chosen = lists.take(members)
            device = lists.main[0].device
            rounded = [
                torch.empty(main.shape, dtype=rule.dtype, device=device) for main in chosen.main
            ]
            momenta = chosen.only(MOMENTUM, scale_key(MOMENTUM))
            momenta = replace(momenta, main=[], output=rounded)
            params = replace(chosen.only(MAIN, REMAINDER), grad=rounded)
            backend.muon_momentum(momenta, scalars, multiplier)
            if is_here:
                ways = whole_directions(rule, rounded)
            else:
                regions = [launch.regions[index] for index in members]
                some = launch._replace(lists=chosen, updates=updates.take(members), regions=regions)
                ways = _directions(rule, rounded, some, backend)
            values, factors = zip(*ways, strict=True)
            backend.muon_apply(replace(params, grad=list(values)), scalars, factors)
        backend.average(lists)


def _shares_matrices(group: Settings, update: SlotUpdate) -> bool:
    """Whether ranks make whole matrices of their parts."""
    return bool(
        group["optimizer"] == "muon"
        and update.layout is not None
        and update.layout.is_shared(group["tp_mode"] == "blockwise")
    )


def _adds_up(group: Settings) -> bool:
    """Whether a step reads sums over whole parameters, beside matrices."""
    is_normalized = group["optimizer"] == "muon" and group.get("moment2_method")
    return bool(group.get("caution") or is_normalized)


def _directions(
    rule: Orthogonalization, rounded: Sequence[Tensor], launch: Launch, backend: Backend
) -> list[Direction]:
    """The direction of each parameter of a run, for this rank's part of it. Collective if some are
    split over ranks.

    Args:
        rounded: momenta; overwritten.
        launch: of these parameters.
    """
    owners, updates = launch.workspace, launch.updates
    assert isinstance(owners, MatrixOwners)
    layouts = updates.layouts or [None] * len(updates)
    found = directions(rule, rounded, layouts, owners)
    if rule.is_normalized:
        moments = launch.lists.state[MOMENT2]
        found = normalized(rule, found, moments, updates, launch.regions)
    return _cautious(found, launch, backend) if launch.settings.get("caution") else found


def _cautious(found: Sequence[Direction], launch: Launch, backend: Backend) -> list[Direction]:
    """Directions with 0 where they do not go the way of the gradient, for as much more of the
    others, which is counted over the whole parameter."""
    multiplier = float(launch.factor)
    masks = [
        agreeing(way.values.float(), grad.reshape(way.values.shape).float() * multiplier)
        for way, grad in zip(found, launch.lists.grad, strict=True)
    ]
    counts = torch.stack([mask.sum() for mask in masks])[:, None]
    sizes = add_up_parts(counts, launch.updates, launch.regions, CAUTION_REDUCTION)
    scales = backend.caution_scales(counts, sizes)
    return [
        Direction(way.values * mask, fp32(way.factor * float(scale)))
        for way, mask, scale in zip(found, masks, scales, strict=True)
    ]


class FusedMuon(RuleOptimizer):
    """Muon over FP32 matrices, shape (rows, columns), and stacks of them, shape (experts, rows,
    columns), with decoupled weight decay. Groups with ``optimizer="adam"`` or ``"lion"`` are
    stepped by that rule instead.

    The products of matrices are taken where the model's parameter lies, of the whole matrix,
    however it is split and wherever it is stepped.

    Args:
        momentum: of the exponential average of gradients.
        nesterov: orthogonalise the average one step ahead.
        num_ns_steps, coefficient_type: the Newton-Schulz iteration (see
            :mod:`mp_optim.config.rules`).
        ns_method: ``standard``, or ``gram``, whose steps multiply the smaller X X^T where a matrix
            is at least twice as long as wide.
        scale_mode, extra_scale_factor: of the step.
        fp32_matmul_prec: ``medium`` for products in bfloat16, ``highest`` for FP32.
        tp_mode: ``duplicated`` (Megatron's name) orthogonalises a matrix that is split over ranks
            whole, on one of them; ``blockwise`` each part by itself.
        qkv_split_shapes: rows of the query, key and value part of each query group in a fused
            matrix, whose parts are orthogonalised by themselves; None for matrices that are one.
        moment2_method: ``normuon`` brings the rows of a direction to one size (see
            :mod:`mp_optim.muon.orthogonalization`); None leaves them. beta2: of their average.
        betas, eps, bias_correction, adam_w_mode: of groups that are stepped by Adam or Lion.
        caution, cautious_wd: see ``OptimizerConfig``; of all groups.
        scalar_optimizer: which of these two; what ``backend`` has to have kernels for.
        **precision: fields of :class:`~mp_optim.kernels.state_format.StatePrecision`;
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
        ns_method: str = "standard",
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        fp32_matmul_prec: str = "medium",
        tp_mode: str = "duplicated",
        qkv_split_shapes: tuple[int, ...] | None = None,
        moment2_method: str | None = None,
        beta2: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        caution: bool = False,
        cautious_wd: bool = False,
        scalar_optimizer: str = "adam",
        backend: str = "auto",
        **precision: Any,
    ) -> None:
        if scalar_optimizer not in SCALAR_OPTIMIZERS:
            raise ValueError(
                f"scalar_optimizer={scalar_optimizer!r}: must be one of {list(SCALAR_OPTIMIZERS)}"
            )
        rule = MuonRule(_SCALARS[scalar_optimizer])
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "momentum": momentum,
            "nesterov": nesterov,
            "scale_mode": scale_mode,
            "extra_scale_factor": extra_scale_factor,
            "fp32_matmul_prec": fp32_matmul_prec,
            "num_ns_steps": num_ns_steps,
            "coefficient_type": coefficient_type,
            "ns_method": ns_method,
            "tp_mode": tp_mode,
            "qkv_split_shapes": qkv_split_shapes,
            "moment2_method": moment2_method,
            "beta2": beta2,
            "caution": caution,
            "cautious_wd": cautious_wd,
            "optimizer": rule.name,
        }
        super().__init__(rule, params, settings, backend, precision)
