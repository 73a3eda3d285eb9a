"""The rules by Triton kernels: one launch for all tensors that share dtypes, however many there are.

Bit for bit what ``reference`` computes. What the kernels do not read, such as FP64 gradients, goes to it.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from mp_optim.slots import SteadyList
from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.backends.triton.kernels import lamb, rules, sums
from mp_optim.update.backends.triton.kinds import Kind, Part, parts_of
from mp_optim.update.backends.triton.tables import RUN, Plan, Tables
from mp_optim.update.lists import (
    REMAINDER,
    AdamScalars,
    LambScalars,
    LionScalars,
    SgdScalars,
    TensorLists,
    scale_key,
)
from mp_optim.update.sums import root

__all__ = ["CHUNK", "SUM_CHUNK", "TritonBackend"]

CHUNK = 8192
"""Elements a program steps: eight blocks of 1024, so that LAMB's sums of a chunk are those of ``sums``."""
SUM_CHUNK = 16384
"""Elements a program sums."""
ROWS = 8
"""Blocks of 256 elements in a tile: 16 elements for each of 128 threads, 16 bytes of 8-bit states."""
OLDEST = (3, 6)
"""The first Triton whose ``div_rn`` and ``sqrt_rn`` keep denormals: 3.5.1 emits ``div.rn.ftz.f32``."""
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 4}

Multiplier = float | Tensor
"""A number; or FP32 on the tensors' device, shape (1,) or (2,): what gradients are multiplied with, and a flag that
is not 0 if nothing is to be written. What is on the device can be formed there, without the host waiting for it."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int16: tl.int16,
          torch.int8: tl.int8, torch.uint8: tl.uint8, None: None}
_ADAM = ("exp_avg", "exp_avg_sq")


class TritonBackend(ReferenceBackend):
    """Launches the kernels; ``reference`` does what they cannot.

    Attributes:
        device_type: of the tensors it can step.
        runs_on: the same in words.

    Raises:
        RuntimeError: there is neither a device nor the interpreter, or this Triton computes other bits.
    """

    name = "triton"
    takes_device_multipliers = True

    def __init__(self) -> None:
        interpreted = not isinstance(rules.adam, triton.runtime.JITFunction)
        if not interpreted and not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU, and TRITON_INTERPRET=1 was not set before Triton was imported")
        if not interpreted and tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
            raise RuntimeError(f"Triton {triton.__version__} takes denormals for 0 in divisions and square roots; "
                               f"{'.'.join(map(str, OLDEST))} and later do not")
        self.device_type = "cpu" if interpreted else "cuda"
        self.runs_on = f"Triton {triton.__version__}" + (", interpreted" if interpreted else "")
        self._tables = Tables()

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: Multiplier) -> None:
        for part in parts_of(lists, _ADAM):
            if part.kind is None:
                if (value := _on_host(multiplier)) is not None:
                    super().adam(part.lists, scalars, value)
            else:
                self._step(rules.adam, part, _ADAM, multiplier, **_fields(scalars),
                           HAS_DECAY=scalars.decay != 0.0, HAS_L2=scalars.l2 != 0.0)

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: Multiplier) -> None:
        moments = ("momentum_buffer",) if "momentum_buffer" in lists.state else ()
        for part in parts_of(lists, moments):
            if part.kind is None:
                if (value := _on_host(multiplier)) is not None:
                    super().sgd(part.lists, scalars, value)
            else:
                self._step(rules.sgd, part, moments, multiplier, **_fields(scalars, "nesterov", "first"),
                           HAS_DECAY=scalars.decay != 0.0, NESTEROV=scalars.nesterov, FIRST=scalars.first)

    def lion(self, lists: TensorLists, scalars: LionScalars, multiplier: Multiplier) -> None:
        for part in parts_of(lists, _ADAM[:1]):
            if part.kind is None:
                if (value := _on_host(multiplier)) is not None:
                    super().lion(part.lists, scalars, value)
            else:
                self._step(rules.lion, part, _ADAM[:1], multiplier, **_fields(scalars),
                           HAS_DECAY=scalars.decay != 0.0)

    def lamb(self, lists: TensorLists, scalars: LambScalars, multiplier: Multiplier) -> None:
        """The whole step, for tensors that are whole parameters; their ratios are formed on the device."""
        self.lamb_finish(lists, scalars, self.lamb_moments(lists, scalars, multiplier), multiplier)

    def lamb_finish(self, lists: TensorLists, scalars: LambScalars, sums: Tensor, multiplier: Multiplier) -> None:
        skip = multiplier[1:] if isinstance(multiplier, Tensor) and multiplier.numel() == 2 else None
        self.lamb_apply(lists, scalars, _ratios(scalars, sums), skip)

    def lamb_moments(self, lists: TensorLists, scalars: LambScalars, multiplier: Multiplier) -> Tensor:
        parts = parts_of(lists, _ADAM)
        found = [self._moments(part, scalars, multiplier) for part in parts]
        if len(found) == 1:
            return found[0]
        device = lists.main[0].device if lists.main else torch.device("cpu")
        sums = torch.zeros(len(lists.main), 2, dtype=torch.float64, device=device)
        for part, values in zip(parts, found, strict=True):
            sums.index_copy_(0, self._index(part.indices, device), values)
        return sums

    def _moments(self, part: Part, scalars: LambScalars, multiplier: Multiplier) -> Tensor:
        device = part.lists.main[0].device
        if part.kind is None:
            value = _on_host(multiplier)
            if value is not None:
                return super().lamb_moments(part.lists, scalars, value)
            return torch.zeros(len(part.lists.main), 2, dtype=torch.float64, device=device)
        plan = self._tables.plan(part.lists.main, CHUNK, device)
        sums = torch.empty(plan.programs, 2, dtype=torch.float64, device=device)
        self._launch(lamb.lamb_moments, part._replace(kind=part.kind._replace(output=None)), _ADAM, multiplier,
                     **_fields(scalars, "lr", "adapts"), sums=sums,
                     HAS_DECAY=scalars.decay != 0.0, HAS_L2=scalars.l2 != 0.0)
        return self._added(plan, sums)

    def lamb_apply(self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float] | Tensor,
                   skip: Tensor | None = None) -> None:
        """Take the step, each tensor with its own ratio.

        Args:
            ratios: FP32 values; or a tensor of them on the tensors' device.
            skip: FP32, shape (1,), on the device: not 0 if nothing is to be written.
        """
        for part in parts_of(lists, _ADAM):
            device = part.lists.main[0].device
            if part.kind is None:
                if skip is None or not skip.item():
                    numbers = ratios.tolist() if isinstance(ratios, Tensor) else ratios
                    super().lamb_apply(part.lists, scalars, [numbers[index] for index in part.indices])
                continue
            if not isinstance(ratios, Tensor):
                mine = torch.tensor([ratios[index] for index in part.indices], dtype=torch.float32)
                table = self._tables.upload(mine, device)
            elif len(part.indices) == len(lists.main):
                table = ratios
            else:
                table = ratios.index_select(0, self._index(part.indices, device))
            self._step(lamb.lamb_apply, part, _ADAM, 1.0, skip, ratios=table, HAS_DECAY=scalars.decay != 0.0,
                       **_fields(scalars, "beta1", "grad_weight", "beta2", "one_minus_beta2", "l2", "lr", "adapts"))

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        steady = SteadyList.of(tensors)
        if len(steady.dtypes) == 1:
            return self._sum_alike(steady)
        device = steady[0].device if steady else torch.device("cpu")
        sums = torch.empty(len(steady), dtype=torch.float64, device=device)
        for dtype in steady.dtypes:
            mine = [index for index, tensor in enumerate(steady) if tensor.dtype == dtype]
            sums.index_copy_(0, self._index(mine, device), self._sum_alike(SteadyList(steady[i] for i in mine)))
        return sums

    def _sum_alike(self, tensors: SteadyList) -> Tensor:
        """Sums of squares of tensors of one dtype."""
        if tensors[0].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return super().sum_of_squares(tensors)
        if not tensors.contiguous:
            tensors = SteadyList(tensor.contiguous() for tensor in tensors)
        device = tensors[0].device
        plan, column = self._tables.plan(tensors, SUM_CHUNK, device), self._tables.column(tensors, device)
        found = torch.empty(plan.programs, 1, dtype=torch.float64, device=device)
        if plan.programs:
            with _current(device):
                sums.chunk_sums[(plan.programs,)](plan.owners, plan.firsts, plan.sizes, column.values, found,
                                                  TYPE=_TYPES[tensors[0].dtype], ALIGNED=column.aligned,
                                                  CHUNK=SUM_CHUNK, **OPTIONS)
        return self._added(plan, found)[:, 0]

    def _added(self, plan: Plan, values: Tensor) -> Tensor:
        """From sums of chunks, shape (programs, columns), to sums of tensors."""
        for each in plan.rounds:
            results = torch.empty(each.programs, values.shape[1], dtype=torch.float64, device=values.device)
            with _current(values.device):
                sums.run_sums[(each.programs,)](each.owners, each.firsts, each.starts, each.counts, values, results,
                                                COLUMNS=values.shape[1], RUN=RUN, **OPTIONS)
            values = results
        return values

    def _step(self, kernel: Any, part: Part, moments: tuple[str, ...], multiplier: Multiplier,
              skip: Tensor | None = None, **values: Any) -> None:
        self._launch(kernel, part, moments, multiplier, skip, **values)
        increment_version([*part.lists.main, *(output for output in part.lists.output if output is not None)])

    def _launch(self, kernel: Any, part: Part, moments: tuple[str, ...], multiplier: Multiplier,
                skip: Tensor | None = None, **values: Any) -> None:
        lists, kind = part.lists, part.kind
        assert kind is not None
        device = lists.main[0].device
        plan = self._tables.plan(lists.main, CHUNK, device)
        if not plan.programs:
            return
        columns, aligned = self._columns(lists, kind, moments)
        if isinstance(multiplier, Tensor) and multiplier.numel() == 2:
            multiplier, skip = multiplier[:1], multiplier[1:]
        streams, seed = self._noise(lists, device)
        with _current(device):
            kernel[(plan.programs,)](
                plan.owners, plan.firsts, plan.sizes, streams, seed, multiplier, skip, *columns, **values,
                **{name.upper(): _TYPES[dtype] for name, dtype in kind._asdict().items()},
                NOISY=streams is not None, ON_DEVICE=isinstance(multiplier, Tensor), ALIGNED=aligned, CHUNK=CHUNK,
                ROWS=ROWS, **OPTIONS)

    def _columns(self, lists: TensorLists, kind: Kind, moments: tuple[str, ...]) -> tuple[list[Tensor | None], bool]:
        """Addresses of the parts of all tensors, in the order in which kernels take them; and whether all of those
        but the scales are multiples of 16."""
        state = lists.state
        first, second = [*moments, "", ""][:2]
        parts = [lists.grad, lists.main, state.get(REMAINDER), state.get(first), state.get(second),
                 lists.output if kind.output is not None else None]
        columns = [None if part is None else self._tables.column(part, lists.main[0].device)  # type: ignore[arg-type]
                   for part in parts]
        scales = [None if scale is None else self._tables.column(scale, lists.main[0].device).values
                  for scale in (state.get(scale_key(name)) for name in (first, second))]
        addresses = [None if column is None else column.values for column in columns]
        return [*addresses[:5], *scales, addresses[5]], all(column.aligned for column in columns if column)

    def _noise(self, lists: TensorLists, device: torch.device) -> tuple[Tensor | None, int]:
        """Streams on the device, and the seed as the int32 of the same bits."""
        if not lists.noise:
            return None, 0
        seed = lists.noise[0].seed
        streams = self._tables.values(array("I", [noise.stream for noise in lists.noise]), device)
        return streams, seed - (seed >> 31 << 32)

    def _index(self, indices: Sequence[int], device: torch.device) -> Tensor:
        return self._tables.values(array("q", indices), device)


def _fields(scalars: Any, *without: str) -> dict[str, Any]:
    return {name: getattr(scalars, name) for name in scalars.__slots__ if name not in without}


def _ratios(scalars: LambScalars, sums: Tensor) -> Tensor:
    """lr * ||p|| / ||u|| where the rule adapts and both norms are positive, else lr: in double, rounded to FP32."""
    if not scalars.adapts:
        return torch.full((len(sums),), scalars.lr, dtype=torch.float64, device=sums.device).float()
    param, update = root(sums).unbind(1)
    return torch.where((param == 0.0) | (update == 0.0), scalars.lr, param * scalars.lr / update).float()


def _on_host(multiplier: Multiplier) -> float | None:
    """The multiplier as a number, or None if nothing is to be written; waits for the device."""
    if not isinstance(multiplier, Tensor):
        return multiplier
    value, *skip = multiplier.tolist()
    return None if skip and skip[0] else float(value)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
