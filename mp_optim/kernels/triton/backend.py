"""Backend with Triton kernels: one launch steps all tensors with equal dtypes.

The kernels have the bits of ``reference``, which steps tensors that the kernels do not support,
such as FP64 gradients.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.core import CachedTensorList
from mp_optim.host.accelerator import CUDA, current_device
from mp_optim.host.calls import tell_autograd
from mp_optim.kernels.chunking import mark_written, model_tensors
from mp_optim.kernels.kernel_args import (
    AlikeLists,
    LambScalars,
    LaunchDtypes,
    MuonScalars,
    TensorLists,
    alike_lists,
    continued,
    kept_moments,
    prepare_launch,
    prepared_launch,
)
from mp_optim.kernels.reference import MOMENTUM, ReferenceBackend
from mp_optim.kernels.sums import by_dtype, root
from mp_optim.kernels.triton.kernels import rules, tiles, two_passes
from mp_optim.kernels.triton.kernels.tiles import Flags
from mp_optim.kernels.triton.launches import (
    CHUNK,
    MOST_LAUNCHES,
    RATE,
    Multiplier,
    Pass,
    added,
    on_host,
    row_for,
    step_form,
    sum_alike,
)
from mp_optim.kernels.triton.proofs import FormProofs
from mp_optim.kernels.triton.tables import Plan, Tables

OLDEST = (3, 6)
"""The first Triton version with denormals in ``div_rn`` and ``sqrt_rn``. Version 3.5.1 emits
``div.rn.ftz.f32``, which flushes denormals."""

_ADAM = ("exp_avg", "exp_avg_sq")
_TRIED, _TRIED_EACH = 0.375, 0.01171875
"""Multiplier of a trial, and the number for each tensor of a trial."""
_REFERENCE = ReferenceBackend()


class TritonBackend(ReferenceBackend):
    """Backend that launches Triton's kernels. ``reference`` computes steps that the kernels do not
    support.

    Attributes:
        device_type: device type on which the kernels run.
        runs_on: Triton's version, for reports.
        tables: tables on the device that launches read.
        proofs: results of comparing kernels with ``reference``.

    Raises:
        RuntimeError: neither a GPU nor the interpreter is available, or this version of Triton
            computes other bits.
    """

    name = "triton"
    takes_device_multipliers = True
    follows_weights = True

    def __init__(self) -> None:
        self.interpreted = not isinstance(rules.adam, triton.runtime.JITFunction)
        if not self.interpreted and not CUDA.is_available():
            raise RuntimeError(
                "torch sees no GPU, and TRITON_INTERPRET=1 was not set before Triton was imported; "
                "use a GPU, or set the variable before the start of Python"
            )
        if not self.interpreted and tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
            raise RuntimeError(
                f"Triton {triton.__version__} flushes denormals to 0 in divisions and square "
                f"roots; install {'.'.join(map(str, OLDEST))} or later"
            )
        self.device_type = "cpu" if self.interpreted else CUDA.type
        self.runs_on = f"Triton {triton.__version__}" + (
            ", interpreted" if self.interpreted else ""
        )
        self.tables = Tables()
        self.proofs = FormProofs()

    def prove_at_first_use(self) -> None:
        self.proofs.is_on = True

    # -- launches ---------------------------------------------------------------------------------

    def _holds(self, one: Pass, part: AlikeLists) -> bool:
        """True if the kernels of a pass have the bits of ``reference`` for a part's dtypes and
        alignment."""
        if not self.proofs.is_on:
            return True
        lists, device = part.lists, part.lists.grad[0].device
        form = tuple(bool(getattr(one.scalars, name)) for name in one.scalars.__slots__)
        given = isinstance(one.multiplier, Tensor), one.each is None, one.skip is None
        common = (one.kernel.__name__, part.kind, form, given, lists.follows, lists.noise is None)

        def trial(backend: ReferenceBackend, some: TensorLists) -> Tensor | None:
            numbers: list[Any] = [_TRIED]
            if one.each is not None:
                numbers = [[_TRIED_EACH] * len(some.grad)]
            # Only the kernels support a multiplier on the device and a flag that skips the step.
            if backend is self:
                if isinstance(one.multiplier, Tensor):
                    pair = torch.tensor([_TRIED, 0.0], device="cpu").to(device)
                    numbers = [pair[: one.multiplier.numel()]]
                if one.skip is not None:
                    numbers.append(torch.zeros_like(one.skip))
            tried: Tensor | None = one.run_by(backend, some, *numbers)
            return tried

        return all(
            self.proofs.holds((*common, aligned, device), self, part, 0 if aligned else 1, trial)
            for _, aligned in self.tables.launch_of(part, one.moments, CHUNK)[1]
        )

    def parts(self, one: Pass) -> Iterator[tuple[AlikeLists, Tensor | None]]:
        """Divide the lists of a pass into parts with equal dtypes, each with the scalars on the
        device.

        The scalars are None for a part that no kernel supports.
        """
        for part in alike_lists(one.lists, one.moments):
            part = part._replace(lists=continued(part.lists, part.kind))
            numbers = None
            if part.kind is not None and self._holds(one, part):
                row = row_for(part.lists, one.scalars)
                numbers = self.tables.row(row, part.lists.grad[0].device)
            yield part, numbers

    def announce(self, lists: TensorLists, scalars: Any, device: torch.device) -> None:
        self.tables.row(row_for(lists, scalars), device)

    def run_pass(self, one: Pass, keeps: bool = False) -> None:
        """Run a pass that writes tensors. ``reference`` runs the parts that no kernel supports.

        Args:
            one: the pass.
            keeps: True to cache the launch for :meth:`launch_again`.
        """
        for part, numbers in self.parts(one):
            if numbers is not None:
                made = None if one.each is None else self._table(part, one.each)
                columns, plans = self.tables.launch_of(part, one.moments, CHUNK)
                for plan, aligned in plans:
                    self.launch(one, part, plan, aligned, columns, numbers, made)
                mark_written(part.lists)
                if keeps:
                    rule = one.kernel.__name__
                    known = prepared_launch(part.lists, rule)
                    by_grads = {} if known is None else known.launch
                    if len(by_grads) >= MOST_LAUNCHES:
                        by_grads = {}
                    addresses = CachedTensorList.of(part.lists.grad).addresses.tobytes()
                    by_grads[addresses] = columns, plans
                    prepare_launch(rule, part, model_tensors(part.lists), by_grads)
            elif (value := on_host(one.multiplier, one.skip)) is not None:
                own = None if one.each is None else [float(one.each[at]) for at in part.indices]
                one.run_by(_REFERENCE, part.lists, value if own is None else own)

    def sums_of(self, one: Pass, sums: Tensor) -> Tensor:
        """Run a pass that returns sums, and return the sums with a row for each tensor.

        Args:
            one: the pass.
            sums: FP64 zeros with a row for each tensor; may be overwritten.
        """
        for part, numbers in self.parts(one):
            found: Tensor | None = None
            if numbers is not None and part.kind is not None:
                part = part._replace(kind=part.kind._replace(output=None))
                columns, plans = self.tables.launch_of(part, one.moments, CHUNK)
                for plan, aligned in plans:
                    made = sums.new_empty(plan.programs, sums.shape[1])
                    self.launch(one, part, plan, aligned, columns, numbers, made)
                    some = added(plan, made)
                    # A tensor without programs in a plan has sum 0 there, so add the sums of both
                    # plans.
                    found = some if found is None else found + some
            elif (value := on_host(one.multiplier)) is not None:
                found = one.run_by(_REFERENCE, part.lists, value)
            if found is not None and len(part.indices) == len(sums):
                return found
            if found is not None:
                sums.index_copy_(0, self.index(part.indices, sums.device), found)
        return sums

    def launch_again(self, one: Pass) -> bool:
        """Repeat the cached launch of a pass, if an earlier launch had the same gradient addresses.

        Returns:
            True if the pass was launched; False if no such launch is cached.
        """
        known, lists = prepared_launch(one.lists, one.kernel.__name__), one.lists
        if known is None:
            return False
        addresses = CachedTensorList.of(lists.grad).addresses.tobytes()
        if (launches := known.launch.get(addresses)) is None:
            return False
        part = AlikeLists(range(len(lists.grad)), known.kind, continued(lists, known.kind))
        numbers = self.tables.row(row_for(lists, one.scalars), lists.grad[0].device)
        columns, plans = launches
        for plan, aligned in plans:
            self.launch(one, part, plan, aligned, columns, numbers, None)
        tell_autograd(known.written)
        return True

    def launch(
        self,
        one: Pass,
        part: AlikeLists,
        plan: Plan,
        aligned: bool,
        columns: Sequence[Tensor | None],
        numbers: Tensor,
        made: Tensor | None,
    ) -> None:
        """Launch the programs of a plan.

        Args:
            one: the pass.
            part: lists of the launch.
            plan: tensor and chunk of each program.
            aligned: True if all addresses are multiples of 16.
            columns: tables of the tensors' addresses.
            numbers: row of scalars on the device.
            made: tensor on the device that the pass reads or writes in addition to the lists, or
                None.
        """
        (_, kind, lists), flags, skip, multiplier = part, one.flags, one.skip, one.multiplier
        assert kind is not None
        device = lists.grad[0].device
        if not plan.programs:
            return
        if lists.follows and kind.output is not None:
            flags = flags._replace(follows=True)
        if isinstance(multiplier, Tensor) and multiplier.numel() == 2:
            multiplier, skip = multiplier[:1], multiplier[1:]
        streams = self.tables.streams(lists, device)
        tables = (plan.owners, plan.firsts, plan.sizes, streams)
        on_device = isinstance(multiplier, Tensor)
        form = step_form(tiles.step, one.kernel, flags, kind, on_device, aligned, CHUNK)
        with current_device(device):
            given = (*tables, numbers, multiplier, skip, *columns, made)
            form.launch(plan.programs, *given)

    def index(self, indices: Sequence[int], device: torch.device) -> Tensor:
        return self.tables.values(array("q", indices), device)

    # -- rules ------------------------------------------------------------------------------------

    def step(self, rule: str, lists: TensorLists, scalars: Any, multiplier: Multiplier) -> None:
        kernel, moments = getattr(rules, rule), kept_moments(lists, RULES[rule].moment_names)
        one = Pass(kernel, lists, moments, scalars, Flags.of(scalars), multiplier)
        if not self.launch_again(one):
            self.run_pass(one, keeps=True)

    def _table(self, part: AlikeLists, values: Sequence[float] | Tensor) -> Tensor:
        """Return an FP32 table on the device with the number of each tensor of a part."""
        if not isinstance(values, Tensor):
            some = [float(values[index]) for index in part.indices]
            table = torch.tensor(some, dtype=torch.float32, device="cpu")
            return self.tables.upload(table, part.lists.grad[0].device)
        if len(part.indices) == len(values):
            return values
        return values.index_select(0, self.index(part.indices, values.device))

    def lamb_finish(
        self, lists: TensorLists, scalars: LambScalars, sums: Tensor, multiplier: Multiplier
    ) -> None:
        if not lists.main:
            return
        skip = None
        if isinstance(multiplier, Tensor) and multiplier.numel() == 2:
            skip = multiplier[1:]
        numbers = self.tables.row(row_for(lists, scalars), lists.main[0].device)
        # Compute like LambScalars.ratio(), but on the device, so that the host need not wait.
        lr = numbers[RATE : RATE + 2].view(torch.float64)
        ratios = lr.expand(len(sums))
        if scalars.adapts:
            param, update = root(sums).unbind(1)
            ratios = torch.where((param == 0.0) | (update == 0.0), lr, param * lr / update)
        self.lamb_apply(lists, scalars, ratios.float(), skip)

    def lamb_moments(
        self, lists: TensorLists, scalars: LambScalars, multiplier: Multiplier
    ) -> Tensor:
        device = lists.grad[0].device if lists.grad else torch.device("cpu")
        sums = torch.zeros(len(lists.main), 2, dtype=torch.float64, device=device)
        flags = Flags(scalars.decay != 0.0, scalars.l2 != 0.0)

        one = Pass(two_passes.lamb_moments, lists, _ADAM, scalars, flags, multiplier)
        return self.sums_of(one, sums)

    def lamb_apply(
        self,
        lists: TensorLists,
        scalars: LambScalars,
        ratios: Sequence[float] | Tensor,
        skip: Tensor | None = None,
    ) -> None:
        """Step the main params by LAMB, each with its ratio.

        Args:
            lists: tensor lists.
            scalars: scalars of the step.
            ratios: FP32 values; or a tensor with these values on the tensors' device.
            skip: FP32, shape (1,), on the device; if not 0, nothing is written.
        """
        kernel, flags = two_passes.lamb_apply, Flags(scalars.decay != 0.0)
        self.run_pass(Pass(kernel, lists, _ADAM, scalars, flags, each=ratios, skip=skip))

    def muon_momentum(self, lists: TensorLists, scalars: MuonScalars, multiplier: float) -> None:
        kernel, flags = two_passes.muon_momentum, Flags.of(scalars)
        self.run_pass(Pass(kernel, lists, (MOMENTUM,), scalars, flags, multiplier))

    def muon_apply(
        self, lists: TensorLists, scalars: MuonScalars, factors: Sequence[float]
    ) -> None:
        flags = Flags(scalars.decay != 0.0, cautious_wd=scalars.cautious_wd)
        self.run_pass(Pass(two_passes.muon_apply, lists, (), scalars, flags, each=factors))

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        steady = CachedTensorList.of(tensors)
        if len(steady.dtypes) != 1:
            return by_dtype(steady, self.sum_of_squares)
        if self.proofs.is_on:
            dtype, device = steady[0].dtype, steady[0].device
            is_odd = steady.contiguous and bool(self.tables.column(steady, device).odd)
            lists = TensorLists([], steady, {}, [None] * len(steady))
            is_right = self.proofs.holds(
                ("sum_of_squares", dtype, is_odd, device),
                self,
                AlikeLists(range(len(steady)), LaunchDtypes(dtype), lists),
                1 if is_odd else 0,
                lambda backend, some: backend.sum_of_squares(some.grad),
            )
            if not is_right:
                return super().sum_of_squares(tensors)
        return sum_alike(self.tables, steady)

    def sum_in_pairs(self, values: Tensor) -> Tensor:
        if len(values) < 2:
            return values.sum()
        plan = self.tables.plan_of(array("q", [len(values)]), 1, values.device)
        return added(plan, values.view(-1, 1)).view(())
