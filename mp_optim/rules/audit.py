"""Audited steps: a random sample of what a launch steps is stepped a second time by other kernels,
in host memory, and has to have the same bits; what was sampled has to have them still when it is
stepped next. So a flip in a gradient, a moment, a main param or a parameter, in arithmetic or in
memory, is noticed with the probability of being sampled, and a lasting one in the end.

A sample is made of whole blocks of 256 elements, on which every form of state is defined. Which
ones is a function of rank, step and launch. docs/audit.md says what is found, and how soon.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mp_optim.core import CachedTensorList, Slot
from mp_optim.core.tensors import continue_from
from mp_optim.host.calls import in_own_modes, torch_threads_flush, warn
from mp_optim.host.transfer import Transfer, transfer_for
from mp_optim.kernels import Backend, choose_backend, proof_of
from mp_optim.kernels.chunking import part_of_state
from mp_optim.kernels.codecs import Noise, mix
from mp_optim.kernels.kernel_args import MAIN, TensorLists
from mp_optim.kernels.native_library import native_library, other_level
from mp_optim.rules.audit_sample import (
    BITS_OF_SIZE,
    GOLDEN,
    MASK,
    Fetched,
    Run,
    Tensors,
    brought,
    differing,
    draw,
    element_index,
    gather,
)
from mp_optim.rules.rule import Launch

MOST_NAMED = 8
"""Elements that a message names."""

GRAD, OUTPUT, MULTIPLIER, SCALES = "grad", "output", "multiplier", "scales"
_HOST = torch.device("cpu")
_TORCH_OPERATIONS = {"reference", "torch"}
"""Backends whose steps on the host run in torch's own threads."""
_FLUSHED = (
    "a step cannot be compared: threads of torch take denormal numbers for zero, as they were "
    "started after torch.set_flush_denormal(True); call torch.set_flush_denormal(False) before the "
    "first torch operation of the process, or step by the native kernels"
)


class AuditError(RuntimeError):
    """A step, or memory, gave other bits than it should have.

    Attributes:
        mismatches: the elements.
    """

    def __init__(self, message: str, mismatches: Sequence[Mismatch]) -> None:
        super().__init__(message)
        self.mismatches = list(mismatches)


class AuditWarning(UserWarning):
    """The same, where training is to go on.

    Attributes:
        mismatches: the elements.
    """

    def __init__(self, message: str, mismatches: Sequence[Mismatch]) -> None:
        super().__init__(message)
        self.mismatches = list(mismatches)


@dataclass(frozen=True)
class Mismatch:
    """An element that does not have the bits that it should.

    Attributes:
        rank: where. param: of which parameter, by name.
        element: row-major, of what the rank has of it; the first of those that a scale or a byte of
            codes is of.
        tensor: a key of the state, ``main_param``, or ``param``.
        found, expected: values as they are stored. found_bits, expected_bits: and their bits.
        step: of the parameter, from 1 on: the one that wrote it.
        is_resting: whether it had the right bits after that step, and was changed before the next.
    """

    rank: int
    param: str
    element: int
    tensor: str
    found: float
    expected: float
    found_bits: int
    expected_bits: int
    step: int
    is_resting: bool

    def __str__(self) -> str:
        how = "left by step" if self.is_resting else "by repeating step"
        now = "when it was used next" if self.is_resting else "as it was stepped"
        return (
            f"rank {self.rank}, {self.param}, element {self.element}, {self.tensor}: "
            f"{self.found!r} (bits {self.found_bits:#x}) {now}, {self.expected!r} (bits "
            f"{self.expected_bits:#x}) {how} {self.step}"
        )


# -- what is compared -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Runs whose bits are going to be compared.

    Attributes:
        slots: of each run. firsts: where it begins in what the rank has of its parameter.
        step: of these parameters, from 1 on: the one that should have left these bits.
        is_resting: they were right after it.
        by_torch: torch operations on the host stepped or repeated them.
        main: what to call the main param.
        found: what there is. expected: what there should be, under some of its keys.
    """

    runs: Sequence[Run]
    slots: Sequence[Slot]
    firsts: Sequence[int]
    step: int
    is_resting: bool
    by_torch: bool
    main: str
    found: Fetched
    expected: Fetched

    @property
    def begins(self) -> list[int]:
        """Where each run is in what is compared."""
        return list(accumulate((run.room for run in self.runs[:-1]), initial=0))

    def mismatches(self, name_of: Callable[[Slot], str]) -> Iterator[Mismatch]:
        """The elements that have other bits."""
        found, expected = self.found(), self.expected()
        begins = self.begins
        for key, there in found.items():
            if key not in expected:
                continue
            for index in differing(there, expected[key]):
                element = element_index(key, there.dtype, index)
                number = bisect_right(begins, element) - 1
                within = element - begins[number]
                if within < self.runs[number].numel:  # else it fills up a block
                    yield self._mismatch(
                        number, within, key, there[index], expected[key][index], name_of
                    )

    def _mismatch(
        self,
        number: int,
        within: int,
        key: str,
        found: Tensor,
        expected: Tensor,
        name_of: Callable[[Slot], str],
    ) -> Mismatch:
        width = 8 * found.itemsize
        bits = [
            int(each.view(BITS_OF_SIZE[each.itemsize])) % 2**width for each in (found, expected)
        ]
        return Mismatch(
            rank=_rank(),
            param=name_of(self.slots[number]),
            element=self.firsts[number] + within,
            tensor={MAIN: self.main, OUTPUT: "param"}.get(key, key),
            found=found.item(),
            expected=expected.item(),
            found_bits=bits[0],
            expected_bits=bits[1],
            step=self.step,
            is_resting=self.is_resting,
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Rested(NamedTuple):
    """A run as a step left it.

    Attributes:
        run: within what the rank has of its parameter. begin: where it is in what was found then.
    """

    run: Run
    begin: int
    check: Check

    def part(self, key: str) -> Tensor:
        """What it was."""
        return part_of_state(key, self.check.found()[key], self.begin, self.run.room)


@dataclass(frozen=True)
class Audited:
    """A launch that is about to be carried out.

    Attributes:
        launch: as the executor formed it.
        backend: name of the backend that steps it.
        rule, lists, scalars, multiplier, scales: arguments of ``backend.step``; those after
            ``lists`` only if it is called now.
    """

    launch: Launch
    backend: str
    rule: str
    lists: TensorLists
    scalars: Any = None
    multiplier: float | Tensor = 1.0
    scales: Sequence[float] | Tensor | None = None

    @property
    def slots(self) -> Sequence[Slot]:
        """The slot of each tensor."""
        return self.launch.updates.slots

    @cached_property
    def firsts(self) -> Sequence[int]:
        """Places where the tensors begin in the local part of their parameters."""
        return self.launch.firsts or [0] * len(self.slots)

    def kind(self, run: Run) -> tuple[torch.dtype | None, ...]:
        """Dtypes of what a run is in."""
        output = self.lists.output[run.owner]
        kept = [tensors[run.owner].dtype for tensors in self.lists.state.values()]
        grad, main = self.lists.grad[run.owner], self.lists.main[run.owner]
        return grad.dtype, main.dtype, None if output is None else output.dtype, *kept

    def present(self) -> dict[str, Sequence[Tensor]]:
        """Main params and state before the launch."""
        return {MAIN: self.lists.main, **self.lists.state, **(self.lists.source or {})}

    def begin(self, runs: Sequence[Run], transfer: Transfer | None) -> Callable[[], Check]:
        """Copy runs of one kind; what is returned does so again, after the launch.

        NOTE: of the launch, nothing is held that outlives it: it has the step's gradients.
        """
        output = self.lists.output[runs[0].owner]
        given = gather({GRAD: self.lists.grad, **self.present()}, runs)
        if self.lists.follows and output is not None:
            given |= gather({OUTPUT: self.lists.output}, runs)
        for key, numbers in ((MULTIPLIER, self.multiplier), (SCALES, self.scales)):
            if isinstance(numbers, Tensor):
                some = [run.owner for run in runs] if key == SCALES else slice(None)
                given[key] = numbers.view(-1)[some].float()
        noise = self.lists.noise
        scales = None
        if self.scales is not None and not isinstance(self.scales, Tensor):
            scales = [float(self.scales[run.owner]) for run in runs]
        again = Repetition(
            self.rule,
            self.scalars,
            1.0 if isinstance(self.multiplier, Tensor) else self.multiplier,
            scales,
            noise and [_moved(noise[run.owner], run.start) for run in runs],
            self.lists.average_weight,
            None if output is None else output.dtype,
            self.backend,
            [run.room for run in runs],
        )
        expected = partial(again.of, brought(given, transfer))
        names = {_repeats(self.backend)[0].name}
        if self.launch.device.type == "cpu":
            names.add(self.backend)

        def written() -> Check:
            into = {MAIN: self.lists.main, **self.lists.state, OUTPUT: self.lists.output}
            return Check(
                runs,
                [self.slots[run.owner] for run in runs],
                [self.firsts[run.owner] + run.start for run in runs],
                self.launch.step,
                False,
                bool(names & _TORCH_OPERATIONS),
                "param" if output is None else "main_param",
                brought(gather(into, runs), transfer),
                expected,
            )

        return written


@dataclass(frozen=True)
class Repetition:
    """A step of copies of some runs, in host memory.

    Attributes:
        scales, noise: of each run. output: dtype of what is written beside main params.
        stepped_by: name of the backend that is repeated. rooms: elements of each run's blocks.
    """

    rule: str
    scalars: Any
    multiplier: float
    scales: Sequence[float] | None
    noise: list[Noise] | None
    average_weight: float
    output: torch.dtype | None
    stepped_by: str
    rooms: Sequence[int]

    def of(self, come: Fetched) -> Tensors:
        """What a step makes of them; themselves, if the device skipped it."""
        given = {**come()}  # these are copies, of nobody else
        multiplier, scales = self.multiplier, self.scales
        if MULTIPLIER in given:
            multiplier, *skips = given.pop(MULTIPLIER).tolist()
            if skips and skips[0] != 0.0:
                return given
        if SCALES in given:
            scales = given.pop(SCALES).tolist()
        if OUTPUT in given:
            continue_from([given[MAIN]], [given[OUTPUT]])
        elif self.output is not None:
            given[OUTPUT] = torch.empty(given[GRAD].shape, dtype=self.output, device="cpu")
        parts = [(0, sum(self.rooms))]
        if self.noise is not None or scales is not None:  # each run has its own
            parts = list(zip(accumulate(self.rooms, initial=0), self.rooms, strict=False))
        cut = {
            key: CachedTensorList(part_of_state(key, each, *part) for part in parts)
            for key, each in given.items()
        }
        outputs = cut.pop(OUTPUT, [None] * len(parts))
        main, grad = cut.pop(MAIN), cut.pop(GRAD)
        lists = TensorLists(
            main, grad, {**cut}, outputs, noise=self.noise, average_weight=self.average_weight
        )
        backend, in_other_level = _repeats(self.stepped_by)
        with in_other_level():
            backend.step(self.rule, lists, self.scalars, multiplier, scales)
        return given


def _moved(noise: Noise, start: int) -> Noise:
    return replace(noise, start=noise.start + start)


@cache
def _repeats(stepped_by: str) -> tuple[Backend, Callable[[], AbstractContextManager[None]]]:
    """What repeats on the host what a backend has stepped, and in which context: the native
    kernels, with other instructions where it was them; ``reference`` where there is no such
    choice."""
    library = native_library()
    has_kernels = proof_of("native", _HOST).usable
    if stepped_by != "native" and has_kernels:
        return choose_backend("native", _HOST)[0], nullcontext
    if has_kernels and len(library.levels) > 1:
        return choose_backend("native", _HOST)[0], partial(other_level, library)
    return choose_backend("reference", _HOST)[0], nullcontext


# -- of an executor -------------------------------------------------------------------------------


class Audit:
    """Audits the launches of an executor.

    Args:
        rate: share of the elements that a step repeats.
        action: what comes of a mismatch: ``warn`` or ``raise``.
        name_of: names a slot. marks_of: of a slot's tensors, what is another when something else
            than a launch wrote them, or gave them other memory.

    Attributes:
        elements: compared with a repetition so far. mismatches: found so far.
    """

    def __init__(
        self,
        rate: float,
        action: str,
        name_of: Callable[[Slot], str],
        marks_of: Callable[[Slot], object],
    ) -> None:
        self.rate, self.action, self._name_of, self._marks_of = rate, action, name_of, marks_of
        self.elements = self.mismatches = 0
        self._lock = threading.Lock()  # a worker thread has checks, too
        self._pending: list[tuple[int, bool, Check]] = []
        self._resting: dict[Slot, list[Rested]] = {}
        self._marks: dict[Slot, object] = {}
        self._round = 0
        self._transfers: dict[torch.device, Transfer] = {}

    @in_own_modes
    def begin(self, audited: Audited) -> Callable[[], None] | None:
        """Sample a launch before it is carried out; what is returned is called after it. None if
        nothing is sampled."""
        main = CachedTensorList.of(audited.lists.main)
        sizes, ends = main.sizes, main.block_ends
        by_kind: dict[object, list[Run]] = {}
        for run in draw(sizes, ends, self.rate, _seed(audited)):
            by_kind.setdefault(audited.kind(run), []).append(run)
        if not by_kind:
            return None
        transfer = self._transfer(audited.launch.device)
        begun = [audited.begin(runs, transfer) for runs in by_kind.values()]
        return partial(self._written, audited.launch.device, begun)

    @in_own_modes
    def _written(self, device: torch.device, begun: Sequence[Callable[[], Check]]) -> None:
        for check in [each() for each in begun]:
            self._add(check, device.type == "cpu", self._round)
            for run, slot, first, begin in zip(
                check.runs, check.slots, check.firsts, check.begins, strict=True
            ):
                rested = Rested(run._replace(start=first), begin, check)
                self._resting.setdefault(slot, []).append(rested)
                self._marks.pop(slot, None)

    def _transfer(self, device: torch.device) -> Transfer | None:
        if device.type == "cpu":
            return None
        if device not in self._transfers:
            self._transfers[device] = transfer_for(device)
        return self._transfers[device]

    def _add(self, check: Check, is_host: bool, begun: int) -> None:
        with self._lock:
            self._pending.append((begun, is_host, check))

    @in_own_modes
    def compare_rested(self, audited: Audited) -> None:
        """Compare the state that earlier steps left with the state that a launch is about to read.

        NOTE: call this before main params follow the model: a staged copy's marks do not show it.
        """
        if not self._resting:
            return
        by_kind: dict[object, list[tuple[Run, Rested]]] = {}
        for owner, slot in enumerate(audited.slots):
            if slot not in self._resting:
                continue
            first, numel = audited.firsts[owner], audited.lists.main[owner].numel()
            left, marks = [], self._marks.get(slot)
            is_untouched = marks is not None and marks == self._marks_of(slot)
            for rested in self._resting.pop(slot):
                run = rested.run._replace(owner=owner, start=rested.run.start - first)
                if not 0 <= run.start < numel:  # in another window
                    left.append(rested)
                elif is_untouched and rested.check.step + 1 == audited.launch.step:
                    kind = rested.check.main, audited.kind(run)
                    by_kind.setdefault(kind, []).append((run, rested))
            if left:
                self._resting[slot] = left
        for pairs in by_kind.values():
            self._compare_rested(audited, pairs)

    def _compare_rested(self, audited: Audited, pairs: Sequence[tuple[Run, Rested]]) -> None:
        columns, was = audited.present(), pairs[0][1].check
        if was.main == "param":  # others write it, too
            del columns[MAIN]
        runs, rested = [run for run, _ in pairs], [each for _, each in pairs]

        def expected() -> Tensors:
            if [each.begin for each in rested] == was.begins and len(
                {id(e.check) for e in rested}
            ) == 1:
                return was.found()
            return {key: torch.cat([each.part(key) for each in rested]) for key in columns}

        check = Check(
            runs,
            [audited.slots[run.owner] for run in runs],
            [each.run.start for each in rested],
            was.step,
            True,
            False,
            was.main,
            brought(gather(columns, runs), self._transfer(audited.launch.device)),
            expected,
        )
        self._add(check, audited.launch.device.type == "cpu", self._round)

    # -- what comes of it -------------------------------------------------------------------------

    @in_own_modes
    def report(self, wait: bool = False) -> None:
        """A step is over: compare what has come to the host, which is what was stepped there, and
        of a device what was stepped before this.

        Args:
            wait: compare all of it.

        Raises:
            AuditError: there are mismatches, and the action is to raise.
        """
        for slot in list(self._resting):
            if slot not in self._marks:
                self._marks[slot] = self._marks_of(slot)
        found: list[Mismatch] = []
        with self._lock:
            pending, self._pending = self._pending, []
        for begun, is_host, check in pending:
            if not (wait or is_host or begun < self._round):
                self._add(check, is_host, begun)
                continue
            wrong = list(check.mismatches(self._name_of))
            if wrong and check.by_torch and torch_threads_flush():
                warn(AuditWarning(f"audit_rate={self.rate!r}: {_FLUSHED}", []))
                continue
            found += wrong
            if not check.is_resting:
                self.elements += sum(run.numel for run in check.runs)
        self._round += 1
        if found:
            self.mismatches += len(found)
            self._tell(found)

    def _tell(self, found: Sequence[Mismatch]) -> None:
        shown = "; ".join(map(str, found[:MOST_NAMED]))
        more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        message = (
            f"audit_rate={self.rate!r}: {len(found)} numbers have other bits than they should: "
            f"{shown}{more}. A core, memory or the accelerator is faulty, or state was written "
            "without a trace (docs/audit.md). Load the last checkpoint from before this step"
        )
        if self.action == "raise":
            raise AuditError(message, found)
        warn(AuditWarning(message, found))

    def forget(self) -> None:
        """Something else is going to be there: compare nothing with what was."""
        self._pending.clear()
        self._resting.clear()
        self._marks.clear()

    def metrics(self) -> dict[str, float]:
        return {"audited_elements": self.elements, "audit_mismatches": self.mismatches}


def _seed(audited: Audited) -> int:
    """What is sampled of a launch: of other steps, ranks, parameters and parts something else."""
    seed, where = 0, (*chain.from_iterable(audited.slots[:1]), *audited.firsts[:1])
    for number in (audited.launch.step, _rank(), *where):
        seed = mix((seed + number * GOLDEN + 1) & MASK)
    return seed
