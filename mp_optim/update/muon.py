"""Muon (Jordan 2024) for matrices and stacks of them, with Adam or Lion for the rest. Formulas:
docs/numerics.md."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config.rules import SCALAR_OPTIMIZERS, coefficients, scale_factor
from mp_optim.slots import SlotUpdate, SlotUpdates
from mp_optim.slots.slot_state import AVERAGE, REMAINDER, scale_key
from mp_optim.slots.tensor_layout import MatrixParts, ParamLayout, ShardRegion
from mp_optim.update.adam import AdamRule, check_decoupled
from mp_optim.update.backends import Backend
from mp_optim.update.backends import native_library as lib
from mp_optim.update.backends.native import NativeBackend, values_of
from mp_optim.update.backends.reference import MOMENTUM
from mp_optim.update.chunking import mark_written, runs_of
from mp_optim.update.element_rules import agreeing
from mp_optim.update.kernel_args import MAIN, MuonScalars, TensorLists, fp32
from mp_optim.update.lion import LionRule
from mp_optim.update.matrix_exchange import Exchange, MatrixOwners, newton_schulz_flops
from mp_optim.update.newton_schulz import (
    NativeSteps,
    Rooms,
    beside_each_other,
    orthogonalize_each,
    steps_in_place,
)
from mp_optim.update.optimizer import RuleOptimizer
from mp_optim.update.rule import (
    COUNTING,
    ElementRule,
    Launch,
    Rule,
    Settings,
    Workspace,
    add_up_parts,
    parts_over,
)

_SCALARS: dict[str, ElementRule] = {"adam": AdamRule(), "lion": LionRule()}


class MuonRule(Rule):
    """Muon for groups of matrices with ``optimizer="muon"``, and a scalar rule for the others.

    Args:
        scalar: of these.
    """

    name = "muon"
    decides_moments = "betas"

    def __init__(self, scalar: ElementRule) -> None:
        self._scalar = scalar

    @property
    def kernels(self) -> str:
        return self._scalar.name

    def moments(self, group: Settings) -> tuple[str, ...]:
        if group["optimizer"] == "muon":
            return super().moments(group)
        return self._scalar.moments(group)

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
            self._scalar.apply(launch, backend)
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
        rule = MuonRule(_SCALARS[scalar_optimizer])
        settings = rule.settings_from(locals()) | {"optimizer": rule.name}
        super().__init__(rule, params, settings, backend, precision)


# -- from rounded momenta to directions ------------------------------------------------------------

_DTYPES = {"medium": torch.bfloat16, "highest": torch.float32}
_TOGETHER = 1 << 26
"""Elements of parameters that are orthogonalised together: each needs its rounded momentum and its
direction meanwhile."""
_TOGETHER_ON_HOST = 15 << 20
"""The same of what is orthogonalised on the host, by one process: there is nothing to be shared out
evenly, and memory that is used again is at hand, where new memory would be cleared page by page."""


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
    params: Sequence[Tensor], layouts: Sequence[ParamLayout | None], blockwise: bool
) -> Iterator[tuple[list[int], bool]]:
    """Indices of parameters that are orthogonalised together, and whether each of them is whole and
    its products are taken where it is stepped. Runs of those that are split over ranks are the same
    on every rank that has a part of them, as they depend on whole shapes alone.

    Args:
        layouts: of the model's parameters, as many, or none at all.
        blockwise: whether a rank's part is a matrix of its own.
    """
    split, elsewhere, here = [], [], []
    for index, (param, layout) in enumerate(zip_longest(params, layouts)):
        if layout is not None and layout.is_shared(blockwise):
            split.append((index, layout.share(param)))
        elif layout is not None and layout.device != param.device:
            elsewhere.append((index, param.numel()))
        else:
            here.append((index, param.numel()))
    for sizes in (split, elsewhere):
        for members in runs_of(sizes, _TOGETHER):
            yield members, False
    most = _TOGETHER_ON_HOST if params[0].is_cpu else _TOGETHER
    for members in runs_of(here, most):
        yield members, True


def directions(
    rule: Orthogonalization,
    rounded: Sequence[Tensor],
    layouts: Sequence[ParamLayout | None],
    owners: MatrixOwners,
) -> list[Direction]:
    """The direction of each parameter of a run, for this rank's part of it. Collective if some are
    split over ranks.

    Args:
        rounded: momenta in ``rule.dtype``, of this rank's parts, contiguous, on the device they are
            stepped on; overwritten.
        layouts: of the model's parameters, where the products are taken; as many.
        owners: who orthogonalises what is split.

    Raises:
        ValueError: the rows of a fused matrix are no multiple of those of its parts.
    """
    done: dict[int, Direction] = {}
    split: dict[tuple[ProcessGroup, ...], dict[int, MatrixParts]] = {}
    here: dict[torch.device, dict[int, Tensor]] = {}
    for index, (part, layout) in enumerate(zip(rounded, layouts, strict=True)):
        parts = None if layout is None else layout.matrix_parts(rule.blockwise)
        if layout is None or parts is None:
            whole = part
            if layout is not None and layout.is_shared(rule.blockwise):
                whole = layout.gather(part)
            elif layout is not None:
                whole = part.to(layout.device)
            here.setdefault(whole.device, {})[index] = whole
        else:
            split.setdefault(layout.matrix_groups(rule.blockwise), {})[index] = parts
    for wholes in here.values():
        found = whole_directions(rule, list(wholes.values()))
        for index, (values, factor) in zip(wholes, found, strict=True):
            layout = layouts[index]
            if layout is not None and layout.is_shared(rule.blockwise):
                values = layout.own(values)
            done[index] = Direction(values.to(rounded[index].device), factor)
    for groups, parts_of in split.items():
        some, layout = [rounded[index] for index in parts_of], layouts[next(iter(parts_of))]
        assert layout is not None
        found = _by_owners(rule, some, [*parts_of.values()], groups, layout.device, owners)
        done.update(zip(parts_of, found, strict=True))
    return [done[index] for index in range(len(rounded))]


def _by_owners(
    rule: Orthogonalization,
    rounded: Sequence[Tensor],
    parts: Sequence[MatrixParts],
    groups: Sequence[ProcessGroup],
    device: torch.device,
    owners: MatrixOwners,
) -> list[Direction]:
    """The directions of parameters that the same ranks have parts of.

    Args:
        rounded: this rank's parts. parts: who has which. device: where they travel.
    """
    pieces = [_pieces_of(rule, each.rows, each.columns) for each in parts]
    steps, method = len(rule.polynomials), rule.method
    flops = [sum(newton_schulz_flops(*one, steps, method) for one in each) for each in pieces]
    fused = rule.parts is not None  # what comes back is scaled already, and FP32
    dtype = torch.float32 if fused else rule.dtype
    factors = [1.0 if fused else rule.factor(*each[0]) for each in pieces]
    values = [torch.empty_like(part, dtype=dtype) for part in rounded]
    planned = owners.plan(parts, groups, flops, dtype.itemsize)

    def compute(wholes: list[Tensor]) -> list[Tensor]:
        return [direction.values for direction in whole_directions(rule, wholes)]

    exchange = Exchange(planned, parts, groups, rounded, values, device, compute)
    exchange.run()
    owners.bytes_sent += exchange.bytes_sent
    return list(map(Direction, values, factors))


def _pieces_of(rule: Orthogonalization, rows: int, columns: int) -> list[tuple[int, int]]:
    """The shapes of what is orthogonalised by itself in a matrix.

    Raises:
        ValueError: the rows are no multiple of those of heads, or of a fused matrix's parts.
    """
    name, sizes = "rows", tuple[int, ...]((rows,))
    if rule.head_rows is not None:
        sizes, name = (rule.head_rows,), "head_rows"
    elif rule.parts is not None:
        sizes, name = rule.parts, "qkv_split_shapes"
    count, left = divmod(rows, sum(sizes) or 1)
    if left:
        raise ValueError(f"{name}={sizes}: {rows} rows are not a multiple of {sum(sizes)}")
    if name == "qkv_split_shapes":
        return [(size * count, columns) for size in sizes]
    return [(sizes[0], columns)] * max(count, 1)


def whole_directions(
    rule: Orthogonalization, wholes: Sequence[Tensor], rooms: Rooms | None = None
) -> list[Direction]:
    """The directions of whole matrices and stacks of them, where they lie; nothing is sent.

    Args:
        wholes: contiguous, in ``rule.dtype``, on one device; overwritten.
        rooms: memory for what is in between, of their device and dtype.
    """
    if rule.head_rows is not None:
        heads = _heads(wholes, rule.head_rows)
        found = orthogonalize_each(heads, rule.polynomials, rule.method)
        return [
            Direction(values.view(whole.shape), rule.factor(rule.head_rows, whole.size(-1)))
            for values, whole in zip(found, wholes, strict=True)
        ]
    if rule.parts is not None:
        return _by_parts(rule, wholes, rule.parts)
    found = orthogonalize_each(wholes, rule.polynomials, rule.method, rooms)
    factors = {shape: rule.factor(*shape) for shape in {each.shape[-2:] for each in found}}
    return [Direction(each, factors[each.shape[-2:]]) for each in found]


def _heads(wholes: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Views of attention weights as stacks of heads; also of fused ones, whose parts are whole
    heads one after the other.

    Raises:
        ValueError: the rows are no multiple of those of heads.
    """
    for whole in wholes:
        if whole.size(-2) % rows:
            raise ValueError(f"head_rows={rows}: {whole.size(-2)} rows are not a multiple of it")
    return [whole.view(-1, rows, whole.size(-1)) for whole in wholes]


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


# -- a step in one call of the kernels -------------------------------------------------------------
#
# Momenta, norms, Newton-Schulz steps and parameters of one matrix after the other, each of which
# stays in a thread's caches meanwhile.

_ALIGNED = 1024
"""Of elements before a matrix in its tensor there is a multiple."""
_spent = ctypes.c_double()


def seconds_of_products() -> float:
    """Time that these calls have spent in products of matrices, since the process began."""
    return _spent.value


def step_in_one_call(
    rule: Orthogonalization,
    backend: NativeBackend,
    momenta: TensorLists,
    params: TensorLists,
    scalars: MuonScalars,
    multiplier: float,
    rooms: Rooms,
) -> bool:
    """Step whole parameters by kernels that take all of a step. Whether it was done; if not,
    nothing was.

    Args:
        momenta, params: what each pass reads and writes, as many tensors; ``momenta.output`` and
            ``params.grad`` are the same.
    """
    if rule.parts is not None or rule.dtype != torch.bfloat16:
        return False
    pieces = params.grad if rule.head_rows is None else _heads(params.grad, rule.head_rows)
    found = steps_in_place(pieces, rule.polynomials, rule.method, rooms)
    places = None if found is None else _places(*found, params)
    tables = None if places is None else backend.muon_tables(momenta, params)
    if found is None or places is None or tables is None:
        return False
    factors = array("f", [rule.factor(*piece.shape[-2:]) for piece in pieces])
    passes = lib.MuonPasses(
        *(ctypes.pointer(table.tensors) for table in tables),
        ctypes.pointer(values_of(lib.Muon, scalars, multiplier)),
        factors.buffer_info()[0],
        places.buffer_info()[0],
        ctypes.pointer(_spent),
        scalars.decay,
        scalars.cautious_wd,
    )
    found[0].take(passes)
    mark_written(momenta)
    mark_written(params)
    return True


def _places(
    steps: NativeSteps, members: Sequence[Sequence[int]], params: TensorLists
) -> array[int] | None:
    """Tensor and first element of each matrix; None if one begins where kernels cannot."""
    places = array("q")
    for (stack, _), indices in zip(steps.stacks, members, strict=True):
        size = stack.size(1) * stack.size(2)
        for index in indices:
            count = params.grad[index].numel() // size
            if count > 1 and size % _ALIGNED:
                return None
            for matrix in range(count):
                places.extend((index, matrix * size))
    return places
