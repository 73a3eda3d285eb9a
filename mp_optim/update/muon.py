"""Muon (Jordan 2024) for matrices and stacks of them, with Adam or Lion for the rest. Formulas:
docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.rules import RULES, SCALAR_OPTIMIZERS, coefficients
from mp_optim.slots import SlotUpdate, SlotUpdates
from mp_optim.slots.slot_state import AVERAGE, REMAINDER, scale_key
from mp_optim.slots.tensor_layout import ShardRegion
from mp_optim.update.adam import AdamRule, check_cautions
from mp_optim.update.backends import Backend
from mp_optim.update.backends.native import NativeBackend
from mp_optim.update.backends.reference import MOMENTUM
from mp_optim.update.element_rules import agreeing
from mp_optim.update.kernel_args import MAIN, MuonScalars, fp32
from mp_optim.update.matrix_exchange import MatrixOwners
from mp_optim.update.matrix_products import Rooms, beside_each_other
from mp_optim.update.muon_directions import (
    Direction,
    Orthogonalization,
    directions,
    runs,
    step_in_one_call,
    whole_directions,
)
from mp_optim.update.optimizer import RuleOptimizer
from mp_optim.update.rule import (
    COUNTING,
    Launch,
    Rule,
    Settings,
    Workspace,
    add_up_parts,
    parts_over,
    step_by,
    steps_elements,
)

_ADAM = AdamRule()


class MuonRule(Rule):
    """Muon for groups of matrices with ``optimizer="muon"``, and a scalar rule for the others.

    Args:
        scalar: ``adam`` or ``lion``.
    """

    name = "muon"
    decides_moments = "betas"

    def __init__(self, scalar: str) -> None:
        self._scalar = scalar

    @property
    def kernels(self) -> str:
        return self._scalar

    def moments(self, group: Settings) -> tuple[str, ...]:
        if group["optimizer"] == "adam":
            return _ADAM.moments(group)
        return RULES[group["optimizer"]].moment_names

    def unread_moments(self, group: Settings) -> tuple[str, ...]:
        return _ADAM.unread_moments(group) if group["optimizer"] == "adam" else ()

    def reads_steps(self, group: Settings) -> bool:
        return bool(group["optimizer"] == "adam")

    def is_elementwise(self, group: Settings) -> bool:
        return steps_elements(group["optimizer"], group)

    def check_settings(self, group: Settings) -> None:
        if group["optimizer"] not in ("muon", self._scalar):
            raise ValueError(
                f"optimizer={group['optimizer']!r}: must be 'muon' or {self._scalar!r}"
            )
        super().check_settings(group)
        if group["optimizer"] == "adam":
            check_cautions(group)
        coefficients(group["coefficient_type"], group["num_ns_steps"])

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
        counts = group.get("caution") and parts_over(update.shard_groups, update.layout)
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
        lists, group, multiplier = launch.lists, launch.settings, launch.multiplier
        if group["optimizer"] != "muon":
            step_by(group["optimizer"], launch, backend)
            return
        owners, updates = launch.workspace, launch.updates
        assert isinstance(owners, MatrixOwners)
        multiplier = float(multiplier)
        if AVERAGE in lists.state:  # which are taken afterwards, where they lie
            lists = lists.in_place()
        scalars, rule = MuonScalars.at(group), Orthogonalization.of(group)
        owners.begin(each.slot for each in updates if _shares_matrices(group, each))
        rooms = Rooms(lists.main[0].device, rule.dtype)
        for members, is_here in runs(lists.main, updates.layouts, rule.blockwise):
            chosen = lists.take(members)
            shapes = [main.shape for main in chosen.main]
            rounded = beside_each_other(shapes, rooms, "rounded")
            momenta = chosen.only(MOMENTUM, scale_key(MOMENTUM))
            momenta = replace(momenta, main=[], output=rounded)
            params = replace(chosen.only(MAIN, REMAINDER), grad=rounded)
            cautious = bool(group.get("caution"))
            if is_here and isinstance(backend, NativeBackend) and not cautious:
                passes = momenta, params, scalars
                if step_in_one_call(rule, backend, *passes, multiplier, rooms):
                    continue
            backend.muon_momentum(momenta, scalars, multiplier)
            if is_here:
                found = whole_directions(rule, rounded, rooms)
            else:
                layouts = [updates[index].layout for index in members]
                found = directions(rule, rounded, layouts, owners)
            if cautious:
                regions = [launch.regions[index] for index in members]
                some = updates.take(members)
                found = _cautious(found, chosen.grad, multiplier, backend, some, regions)
            values, factors = zip(*found, strict=True)
            backend.muon_apply(replace(params, grad=list(values)), scalars, factors)
        backend.average(lists)


def _shares_matrices(group: Settings, update: SlotUpdate) -> bool:
    """Whether ranks make whole matrices of their parts."""
    return bool(
        group["optimizer"] == "muon"
        and update.layout is not None
        and update.layout.is_shared(group["tp_mode"] == "blockwise")
    )


def _cautious(
    found: Sequence[Direction],
    grads: Sequence[Tensor],
    multiplier: float,
    backend: Backend,
    updates: SlotUpdates,
    regions: Sequence[ShardRegion],
) -> list[Direction]:
    """Directions with 0 where they do not go the way of the gradient, for as much more of the
    others, which is counted over the whole parameter. Collective if some are split over ranks."""
    masks = [
        agreeing(way.values.float(), grad.reshape(way.values.shape).float() * multiplier)
        for way, grad in zip(found, grads, strict=True)
    ]
    counts = torch.stack([mask.sum() for mask in masks])[:, None]
    sizes = add_up_parts(counts, updates, regions, COUNTING)
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
        head_rows: rows of each head of an attention weight: each head is a matrix of its own; None
            for matrices that are not split so.
        betas, eps, bias_correction, adam_w_mode: of groups that are stepped by Adam or Lion.
        caution, cautious_wd: see ``OptimizerConfig``; of all groups.
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
        ns_method: str = "standard",
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        fp32_matmul_prec: str = "medium",
        tp_mode: str = "duplicated",
        qkv_split_shapes: tuple[int, ...] | None = None,
        head_rows: int | None = None,
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
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "num_ns_steps": num_ns_steps,
            "coefficient_type": coefficient_type,
            "ns_method": ns_method,
            "scale_mode": scale_mode,
            "extra_scale_factor": extra_scale_factor,
            "fp32_matmul_prec": fp32_matmul_prec,
            "tp_mode": tp_mode,
            "qkv_split_shapes": qkv_split_shapes,
            "head_rows": head_rows,
            "betas": betas,
            "eps": eps,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "caution": caution,
            "cautious_wd": cautious_wd,
            "optimizer": "muon",
        }
        super().__init__(MuonRule(scalar_optimizer), params, settings, backend, precision)
