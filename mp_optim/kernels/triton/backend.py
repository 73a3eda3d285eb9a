"""The rules by Triton kernels: one launch for all tensors that share dtypes, however many there
are.

Bit for bit what ``reference`` computes. What the kernels do not read, such as FP64 gradients, goes
to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.core import CachedTensorList
from mp_optim.core.tensors import continue_from
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
    kept_moments,
)
from mp_optim.kernels.reference import LEAST_SHARE, MOMENTUM, ReferenceBackend, Scales
from mp_optim.kernels.sums import by_dtype, root
from mp_optim.kernels.triton.kernels import rules, tiles, two_passes
from mp_optim.kernels.triton.kernels.tiles import Flags
from mp_optim.kernels.triton.launches import (
    CHUNK,
    MOST_LAUNCHES,
    RATE,
    KernelLaunch,
    Multiplier,
    Steady,
    added,
    on_host,
    row_for,
    row_of,
    step_form,
    sum_alike,
)
from mp_optim.kernels.triton.proofs import FormProofs, Trial
from mp_optim.kernels.triton.tables import Tables

OLDEST = (3, 6)
"""The first Triton whose ``div_rn`` and ``sqrt_rn`` keep denormals: 3.5.1 emits
``div.rn.ftz.f32``."""

_ADAM = ("exp_avg", "exp_avg_sq")
_TRIED = 0.375
"""The multiplier of trials."""


class TritonBackend(ReferenceBackend):
    """Launches the kernels; ``reference`` does what they cannot.

    Attributes:
        device_type: of the tensors it can step.
        runs_on: the same in words.
        tables: what launches read on the device.
        proofs: of the forms of kernels that were used.

    Raises:
        RuntimeError: there is neither a device nor the interpreter, or this Triton computes other
            bits.
    """

    name = "triton"
    takes_device_multipliers = True
    follows_weights = True

    def __init__(self) -> None:
        self.interpreted = not isinstance(rules.adam, triton.runtime.JITFunction)
        if not self.interpreted and not CUDA.is_available():
            raise RuntimeError(
                "torch sees no GPU, and TRITON_INTERPRET=1 was not set before Triton was imported"
            )
        if not self.interpreted and tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
            raise RuntimeError(
                f"Triton {triton.__version__} takes denormals for 0 in divisions and square roots; "
                f"{'.'.join(map(str, OLDEST))} and later do not"
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

    def _holds(
        self, name: str, part: AlikeLists, moments: tuple[str, ...], given: Any, trial: Trial
    ) -> bool:
        """Whether the kernels that a pass takes for a part have the bits of ``reference``."""
        if not self.proofs.is_on:
            return True
        noisy, device = part.lists.noise is not None, part.lists.grad[0].device
        return all(
            self.proofs.holds(
                (name, part.kind, given, noisy, aligned, device),
                self,
                part,
                0 if aligned else 1,
                trial,
            )
            for _, aligned in self.tables.launch_of(part, moments, CHUNK)[1]
        )

    def parts(
        self,
        name: str,
        lists: TensorLists,
        moments: tuple[str, ...],
        scalars: Any,
        trial: Trial,
        given: Any = None,
    ) -> Iterator[tuple[AlikeLists, Tensor | None]]:
        """Yield the parts with tensors, each with its numbers on the device; without numbers if no
        kernel serves it.

        Args:
            name: of the pass. given: what its kernels depend on beside dtypes and scalars.
            trial: the pass over other lists.
        """
        form = tuple(bool(getattr(scalars, each)) for each in scalars.__slots__), given
        for part in alike_lists(lists, moments):
            if part.lists.follows and not (part.kind and part.kind.compares_weights):
                continue_from(part.lists.main, part.lists.output, part.lists.changed)
                part = part._replace(lists=replace(part.lists, follows=False))
            follows = *form, part.lists.follows
            if part.kind is not None and self._holds(name, part, moments, follows, trial):
                row = row_for(part.lists, scalars)
                yield part, self.tables.row(row, part.lists.grad[0].device)
                continue
            yield part, None

    def announce(self, lists: TensorLists, scalars: Any, device: torch.device) -> None:
        self.tables.row(row_for(lists, scalars), device)

    def launches_of(
        self, rule: Any, part: AlikeLists, moments: tuple[str, ...], flags: Flags
    ) -> list[KernelLaunch]:
        """The launches of a rule over a part, one or two (:meth:`Tables.plans`)."""
        columns, plans = self.tables.launch_of(part, moments, CHUNK)
        return [KernelLaunch(rule, flags, part, *plan, columns) for plan in plans]

    def launch_part(
        self, rule: Any, part: AlikeLists, moments: tuple[str, ...], flags: Flags, *given: Any
    ) -> None:
        """Launch a rule over a part."""
        for launch in self.launches_of(rule, part, moments, flags):
            self.launch(launch, *given)

    def launch_again(
        self, rule: Any, lists: TensorLists, scalars: Any, flags: Flags, multiplier: Multiplier
    ) -> bool:
        """Launch a rule over lists that stayed, with gradients where some were that were looked at;
        says whether it did."""
        known: Steady | None = (
            lists.prepared.get(f"triton {rule.__name__}") if lists.prepared else None
        )
        if known is None or not known.fits(lists):
            return False
        addresses = CachedTensorList.of(lists.grad).addresses.tobytes()
        if (found := known.launches.get(addresses)) is None:
            return False
        columns, plans = found
        numbers = self.tables.row(row_for(lists, scalars), lists.grad[0].device)
        part = known.part._replace(lists=lists)
        for plan, aligned in plans:
            launch = KernelLaunch(rule, flags, part, plan, aligned, columns)
            self.launch(launch, numbers, multiplier)
        tell_autograd(known.written)
        return True

    def keep(self, rule: Any, part: AlikeLists, moments: tuple[str, ...]) -> None:
        """Keep for :meth:`launch_again` what was launched over a part that is all of its lists."""
        lists, name = part.lists, f"triton {rule.__name__}"
        if lists.prepared is None or lists.noise is not None or not isinstance(part.indices, range):
            return
        known: Steady | None = lists.prepared.get(name)
        grads = CachedTensorList.of(lists.grad)
        if known is None or not known.fits(lists) or len(known.launches) >= MOST_LAUNCHES:
            kept = part._replace(lists=replace(lists, grad=[], prepared=None))
            written = model_tensors(lists)
            known = Steady(lists.made_for, kept, grads.own_sizes, written, {})
            lists.prepared[name] = known
        launches = self.tables.launch_of(part, moments, CHUNK)
        known.launches[grads.addresses.tobytes()] = launches

    def launch(
        self,
        launch: KernelLaunch,
        numbers: Tensor,
        multiplier: Multiplier,
        skip: Tensor | None = None,
        made: Tensor | None = None,
    ) -> None:
        """``made``: what the step itself made on the device, or makes there."""
        rule, flags, (_, kind, lists), plan, aligned, columns = launch
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
        form = step_form(tiles.step, rule, flags, kind, on_device, aligned, CHUNK)

        with current_device(device):
            given = (*tables, numbers, multiplier, skip, *columns, made)
            form.launch(plan.programs, *given)

    def index(self, indices: Sequence[int], device: torch.device) -> Tensor:
        return self.tables.values(array("q", indices), device)

    # -- rules ------------------------------------------------------------------------------------

    def step(
        self,
        rule: str,
        lists: TensorLists,
        scalars: Any,
        multiplier: Multiplier,
        scales: Scales | None = None,
    ) -> None:
        kernel, flags = getattr(rules, rule), Flags.of(scalars)
        if scales is None and self.launch_again(kernel, lists, scalars, flags, multiplier):
            return
        moments, device = kept_moments(lists, RULES[rule].moment_names), _device_of(lists)

        def trial(backend: ReferenceBackend, some: TensorLists) -> None:
            own = None if scales is None else [0.75] * len(some.main)
            backend.step(rule, some, scalars, _tried(backend, multiplier, device), own)

        given = isinstance(multiplier, Tensor), scales is None
        for part, numbers in self.parts(rule, lists, moments, scalars, trial, given):
            if numbers is not None:
                made = None if scales is None else self._table(part, scales, len(lists.main))
                self.launch_part(kernel, part, moments, flags, numbers, multiplier, None, made)
                if made is None:
                    self.keep(kernel, part, moments)
                mark_written(part.lists)
            elif (value := on_host(multiplier)) is not None:
                own = None if scales is None else [float(scales[at]) for at in part.indices]
                super().step(rule, part.lists, scalars, value, own)

    def agreements(
        self, rule: str, lists: TensorLists, scalars: Any, multiplier: Multiplier
    ) -> Tensor:
        device = _device_of(lists)
        counts = torch.zeros(len(lists.grad), 1, dtype=torch.int64, device=device)
        moments = kept_moments(lists, RULES[rule].moment_names)
        other = partial(super().agreements, rule)
        given = lists, moments, scalars, multiplier

        def trial(backend: ReferenceBackend, some: TensorLists) -> Tensor:
            return backend.agreements(rule, some, scalars, _tried(backend, multiplier, device))

        return self._whole_sums(two_passes.agreements, *given, counts, other, trial)

    def _whole_sums(
        self,
        kernel: Any,
        lists: TensorLists,
        moments: tuple[str, ...],
        scalars: Any,
        multiplier: Multiplier,
        sums: Tensor,
        by_reference: Callable[[TensorLists, Any, float], Tensor],
        trial: Trial,
    ) -> Tensor:
        """``sums``, zeros with a row for each tensor, by a kernel that writes nothing else; whole
        numbers, which may be added in any order."""
        on_device = isinstance(multiplier, Tensor)
        for part, numbers in self.parts(kernel.__name__, lists, moments, scalars, trial, on_device):
            if numbers is not None:
                assert part.kind is not None
                found = torch.zeros_like(sums[: len(part.indices)])
                part = part._replace(kind=part.kind._replace(output=None))
                for launch in self.launches_of(kernel, part, moments, Flags()):
                    made = sums.new_empty(launch.plan.programs, sums.shape[1])
                    self.launch(launch, numbers, multiplier, made=made)
                    found.index_add_(0, launch.plan.owners, made)
            elif (value := on_host(multiplier)) is not None:
                found = by_reference(part.lists, scalars, value)
            else:
                continue
            sums.index_copy_(0, self.index(part.indices, sums.device), found)
        return sums

    def caution_scales(self, counts: Tensor, sizes: Sequence[int]) -> Tensor:
        """As :meth:`ReferenceBackend.caution_scales`, formed on the device."""
        numels = self.tables.values(array("q", sizes), counts.device).clamp(min=1)
        shares = (counts[:, 0].double() / numels.double()).clamp(min=LEAST_SHARE)
        return shares.reciprocal().float()

    def _table(self, part: AlikeLists, values: Sequence[float] | Tensor, count: int) -> Tensor:
        """A number for each tensor of a part on the device, FP32, from those of all tensors."""
        if not isinstance(values, Tensor):
            some = [float(values[index]) for index in part.indices]
            table = torch.tensor(some, dtype=torch.float32, device="cpu")
            return self.tables.upload(table, part.lists.grad[0].device)
        if len(part.indices) == count:
            return values
        return values.index_select(0, self.index(part.indices, values.device))

    def lamb_finish(
        self, lists: TensorLists, scalars: LambScalars, sums: Tensor, multiplier: Multiplier
    ) -> None:
        if not lists.main:
            return
        skip = (
            multiplier[1:] if isinstance(multiplier, Tensor) and multiplier.numel() == 2 else None
        )
        numbers = self.tables.row(row_of(scalars, 0), lists.main[0].device)
        ratios = _ratios(scalars, sums, numbers)
        self.lamb_apply(lists, scalars, ratios, skip)

    def lamb_moments(
        self, lists: TensorLists, scalars: LambScalars, multiplier: Multiplier
    ) -> Tensor:
        device = _device_of(lists)

        def trial(backend: ReferenceBackend, some: TensorLists) -> Tensor:
            return backend.lamb_moments(some, scalars, _tried(backend, multiplier, device))

        given = isinstance(multiplier, Tensor)
        parts = list(self.parts("lamb_moments", lists, _ADAM, scalars, trial, given))
        part_sums = [self._moments(part, numbers, scalars, multiplier) for part, numbers in parts]
        if len(part_sums) == 1 and len(part_sums[0]) == len(lists.main):
            return part_sums[0]
        sums = torch.zeros(len(lists.main), 2, dtype=torch.float64, device=device)
        for (part, _), values in zip(parts, part_sums, strict=True):
            sums.index_copy_(0, self.index(part.indices, device), values)
        return sums

    def _moments(
        self, part: AlikeLists, numbers: Tensor | None, scalars: LambScalars, multiplier: Multiplier
    ) -> Tensor:
        device = part.lists.main[0].device
        if numbers is None or part.kind is None:
            value = on_host(multiplier)
            if value is not None:
                return super().lamb_moments(part.lists, scalars, value)
            return torch.zeros(len(part.lists.main), 2, dtype=torch.float64, device=device)
        flags = Flags(scalars.decay != 0.0, scalars.l2 != 0.0)
        part = part._replace(kind=part.kind._replace(output=None))
        total = None
        for launch in self.launches_of(two_passes.lamb_moments, part, _ADAM, flags):
            sums = torch.empty(launch.plan.programs, 2, dtype=torch.float64, device=device)
            self.launch(launch, numbers, multiplier, made=sums)
            found = added(launch.plan, sums)
            total = found if total is None else total + found  # 0.0 without programs in a plan
        assert total is not None
        return total

    def lamb_apply(
        self,
        lists: TensorLists,
        scalars: LambScalars,
        ratios: Sequence[float] | Tensor,
        skip: Tensor | None = None,
    ) -> None:
        """Take the step, each tensor with its own ratio.

        Args:
            ratios: FP32 values; or a tensor of them on the tensors' device.
            skip: FP32, shape (1,), on the device: not 0 if nothing is to be written.
        """

        def trial(backend: ReferenceBackend, some: TensorLists) -> None:
            own = [0.01171875] * len(some.main)
            if isinstance(backend, TritonBackend) and skip is not None:
                backend.lamb_apply(some, scalars, own, torch.zeros_like(skip))
            else:
                backend.lamb_apply(some, scalars, own)

        for part, numbers in self.parts(
            "lamb_apply", lists, _ADAM, scalars, trial, skip is not None
        ):
            if numbers is None:
                if skip is None or not skip.item():
                    values = ratios.tolist() if isinstance(ratios, Tensor) else ratios
                    super().lamb_apply(
                        part.lists, scalars, [values[index] for index in part.indices]
                    )
                continue
            table = self._table(part, ratios, len(lists.main))
            flags = Flags(scalars.decay != 0.0)
            self.launch_part(two_passes.lamb_apply, part, _ADAM, flags, numbers, 1.0, skip, table)
            mark_written(part.lists)

    def muon_momentum(self, lists: TensorLists, scalars: MuonScalars, multiplier: float) -> None:
        flags, moments, device = Flags.of(scalars), (MOMENTUM,), _device_of(lists)

        def trial(backend: ReferenceBackend, some: TensorLists) -> None:
            backend.muon_momentum(some, scalars, _tried(backend, multiplier, device))

        given = isinstance(multiplier, Tensor)
        for part, numbers in self.parts("muon_momentum", lists, moments, scalars, trial, given):
            if numbers is not None:
                self.launch_part(
                    two_passes.muon_momentum, part, moments, flags, numbers, multiplier
                )
                mark_written(part.lists)
            elif (value := on_host(multiplier)) is not None:
                super().muon_momentum(part.lists, scalars, value)

    def muon_apply(
        self, lists: TensorLists, scalars: MuonScalars, factors: Sequence[float]
    ) -> None:
        flags = Flags(scalars.decay != 0.0, cautious_wd=scalars.cautious_wd)

        def trial(backend: ReferenceBackend, some: TensorLists) -> None:
            backend.muon_apply(some, scalars, [0.01171875] * len(some.main))

        for part, numbers in self.parts("muon_apply", lists, (), scalars, trial):
            if numbers is None:
                own = [factors[index] for index in part.indices]
                super().muon_apply(part.lists, scalars, own)
                continue
            table = self._table(part, factors, len(lists.main))
            self.launch_part(two_passes.muon_apply, part, (), flags, numbers, 1.0, None, table)
            mark_written(part.lists)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        steady = CachedTensorList.of(tensors)
        if len(steady.dtypes) != 1:
            return by_dtype(steady, self.sum_of_squares)
        if self.proofs.is_on and not self._sums_hold(steady):
            return super().sum_of_squares(tensors)
        return sum_alike(self.tables, steady)

    def _sums_hold(self, tensors: CachedTensorList) -> bool:
        """Whether sums of squares of such tensors have the bits of ``reference``."""
        dtype, device = tensors[0].dtype, tensors[0].device
        is_odd = bool(self.tables.column(tensors, device).odd) if tensors.contiguous else False
        lists = TensorLists([], tensors, {}, [None] * len(tensors))
        return self.proofs.holds(
            ("sum_of_squares", dtype, is_odd, device),
            self,
            AlikeLists(range(len(tensors)), LaunchDtypes(dtype), lists),
            1 if is_odd else 0,
            lambda backend, some: backend.sum_of_squares(some.grad),
        )

    def sum_in_pairs(self, values: Tensor) -> Tensor:
        if len(values) < 2:
            return values.sum()
        plan = self.tables.plan_of(array("q", [len(values)]), 1, values.device)
        return added(plan, values.view(-1, 1)).view(())


def _device_of(lists: TensorLists) -> torch.device:
    return lists.grad[0].device if lists.grad else torch.device("cpu")


def _tried(backend: ReferenceBackend, multiplier: Multiplier, device: torch.device) -> Any:
    """The multiplier of a trial: on the device where that of the step is, and a number for
    ``reference``."""
    if not isinstance(multiplier, Tensor) or not isinstance(backend, TritonBackend):
        return _TRIED
    return torch.tensor([_TRIED, 0.0], device="cpu").to(device)[: multiplier.numel()]


def _ratios(scalars: LambScalars, sums: Tensor, numbers: Tensor) -> Tensor:
    """lr * ||p|| / ||u|| where the rule adapts and both norms are positive, else lr: in double,
    rounded to FP32."""
    lr = numbers[RATE : RATE + 2].view(torch.float64)
    if not scalars.adapts:
        return lr.expand(len(sums)).float()
    param, update = root(sums).unbind(1)
    return torch.where((param == 0.0) | (update == 0.0), lr, param * lr / update).float()
