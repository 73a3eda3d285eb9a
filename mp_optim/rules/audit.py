"""Audits: ``reference`` repeats a random sample of each launch, and compares the bits.

The repetition runs in host memory. An audit finds a flipped bit in the arithmetic, in a gradient
that a kernel reads, or in a tensor that a kernel writes, if the element is in the sample. A sample
consists of whole blocks of 256 elements, because storage formats encode blocks. The sample depends
only on rank, step and launch. docs/audit.md has the rates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mp_optim.config.state_forms import BLOCK, PACKED
from mp_optim.core import CachedTensorList, Slot
from mp_optim.core.slot_state import is_scale
from mp_optim.core.tensors import continue_from
from mp_optim.host.calls import in_own_modes, torch_threads_flush, warn
from mp_optim.host.transfer import Transfer, fetch, transfer_for
from mp_optim.kernels.chunking import part_of_state
from mp_optim.kernels.codecs import is_packed, mix
from mp_optim.kernels.kernel_args import MAIN, TensorLists
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.rules.rule import Launch

CELL = 32
"""Number of neighboring blocks that are sampled together."""
MOST_NAMED = 8
"""Largest number of elements that a message lists."""
GRAD, OUTPUT, MULTIPLIER = "grad", "output", "multiplier"
_REFERENCE = ReferenceBackend()
_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLUSHED = (
    "a step cannot be audited, because torch's threads flush denormal numbers to zero; call "
    "torch.set_flush_denormal(False) before the first torch operation of the process"
)

Pieces = dict[str, list[Any]]
"""Copies of parts of tensors, by key: one copy for each run; None for a run without such a
tensor."""


class _Alarm(Exception):
    """Base class of the error and the warning of an audit.

    Attributes:
        mismatches: elements with other bits than the repetition.
    """

    def __init__(self, message: str, mismatches: Sequence[Mismatch]) -> None:
        super().__init__(message)
        self.mismatches = list(mismatches)


class AuditError(_Alarm, RuntimeError):
    """Error with ``audit_action="raise"``: the bits of a step differ from the repetition of the
    step."""


class AuditWarning(_Alarm, UserWarning):
    """Warning with ``audit_action="warn"``: the bits of a step differ from the repetition of the
    step. Training continues."""


@dataclass(frozen=True)
class Mismatch:
    """An element with other bits than the repetition of its step.

    Attributes:
        rank: rank that stepped the element.
        param: name of the parameter.
        element: row-major index in the rank's shard of the parameter. For a scale or a byte of
            codes, the index of the first element that the scale or byte encodes.
        tensor: a key of the state, ``main_param``, or ``param``.
        found: stored value.
        expected: value of the repetition.
        found_bits: bits of ``found``.
        expected_bits: bits of ``expected``.
        step: number of the step that wrote the value, from 1 on.
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

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, {self.param}, element {self.element}, {self.tensor}: "
            f"{self.found!r} (bits {self.found_bits:#x}) as it was stepped, {self.expected!r} "
            f"(bits {self.expected_bits:#x}) by repeating step {self.step}"
        )


class Run(NamedTuple):
    """Neighboring elements of one tensor of a launch.

    Attributes:
        owner: index of the tensor.
        start: index of the first element, a multiple of 256.
        numel: number of elements: whole blocks, or all elements up to the tensor's end.
    """

    owner: int
    start: int
    numel: int


def draw(sizes: Sequence[int], ends: Sequence[int], rate: float, seed: int) -> Iterator[Run]:
    """Yield a random sample of tensors, in which each element has the probability ``rate``.

    Args:
        sizes: number of elements of each tensor.
        ends: running sum of the tensors' numbers of blocks.
        rate: probability, above 0 and at most 1.
        seed: 32-bit seed.
    """
    total, number, offset = ends[-1] if ends else 0, 0, mix(seed) / 2.0**32
    while (block := int(min((number + offset) / rate, total)) * CELL) < total:
        stop, number = min(total, block + CELL), number + 1
        while block < stop:  # CELL blocks may span several tensors, so yield a run for each.
            owner = bisect_right(ends, block)
            start = (block - (ends[owner - 1] if owner else 0)) * BLOCK
            end = min(stop, ends[owner])
            yield Run(owner, start, min((end - block) * BLOCK, sizes[owner] - start))
            block = end


@dataclass(frozen=True)
class Check:
    """A sample of one launch, copied before and after the launch.

    NOTE: this object outlives the launch, so this object must not reference the launch. Otherwise
    the gradients of the launch would stay allocated.

    Attributes:
        repeat: function that steps copies of the sample, and returns the written tensors.
        given: function that waits for the copies from before the launch, and returns them.
        found: function that waits for the copies from after the launch, and returns them.
        places: for each run, the slot, and the index of the run's first element in the rank's shard
            of the parameter.
        sizes: number of elements of each run.
        main: name of the main param in messages.
        step: number of the step, from 1 on.
        is_on_host: True if the copies can be read without waiting for an accelerator.
    """

    repeat: Callable[[Pieces], Pieces]
    given: Callable[[], Pieces]
    found: Callable[[], Pieces]
    places: Sequence[tuple[Slot, int]]
    sizes: Sequence[int]
    main: str
    step: int
    is_on_host: bool

    def mismatches(self, name_of: Callable[[Slot], str]) -> Iterator[Mismatch]:
        """Repeat the step of the sample, and yield the elements with other bits."""
        expected = self.repeat(self.given())
        for key, tensors in self.found().items():
            for number, (mine, other) in enumerate(
                zip(tensors, expected.get(key, tensors), strict=True)
            ):
                for index in [] if mine is None else _differing(mine, other):
                    element = _element_of(key, mine.dtype, index)
                    # The last byte of codes may have unused bits: skip elements after the run.
                    if element < self.sizes[number]:
                        slot, first = self.places[number]
                        yield Mismatch(
                            rank=_rank(),
                            param=name_of(slot),
                            element=first + element,
                            tensor={MAIN: self.main, OUTPUT: "param"}.get(key, key),
                            found=mine[index].item(),
                            expected=other[index].item(),
                            found_bits=_bits_of(mine[index]),
                            expected_bits=_bits_of(other[index]),
                            step=self.step,
                        )


class Audit:
    """Audits of all launches of an executor.

    Args:
        rate: fraction of the elements that the audit of a step repeats.
        action: ``warn`` or ``raise`` after a mismatch.
        name_of: function that returns a slot's name.

    Attributes:
        elements: number of elements compared so far.
        mismatches: number of elements with other bits so far.
    """

    def __init__(self, rate: float, action: str, name_of: Callable[[Slot], str]) -> None:
        self.rate, self.action, self._name_of = rate, action, name_of
        self.elements = self.mismatches = 0
        # Worker threads append while the training thread removes, so the container is a thread-safe
        # deque.
        self._pending: deque[Check] = deque()
        # The copies of these samples from an accelerator may be in progress. The next report()
        # compares the samples.
        self._on_the_way: list[Check] = []
        self._transfers: dict[torch.device, Transfer] = {}

    @in_own_modes
    def begin(
        self,
        launch: Launch,
        rule: str,
        lists: TensorLists,
        scalars: Any,
        multiplier: float | Tensor,
    ) -> Callable[[], None] | None:
        """Copy a sample of a launch before a backend steps the launch.

        Args:
            launch: the launch.
            rule, lists, scalars, multiplier: arguments of ``Backend.step``.

        Returns:
            A function to call after the step, or None if the sample is empty.
        """
        mains, slots = CachedTensorList.of(lists.main), launch.updates.slots
        firsts = launch.firsts or [0] * len(slots)
        # Seeds differ by step, rank, parameter and window.
        seed = 0
        for number in (launch.step, _rank(), *slots[0], firsts[0]):
            seed = mix((seed + number * 0x9E3779B9 + 1) & 0xFFFFFFFF)
        runs = list(draw(mains.sizes, mains.block_ends, self.rate, seed))
        if not runs:
            return None
        owners = [run.owner for run in runs]
        columns = {GRAD: lists.grad, MAIN: lists.main, **lists.state, **(lists.source or {})}
        given = _copies(columns | ({OUTPUT: lists.output} if lists.follows else {}), runs)
        if isinstance(multiplier, Tensor):
            given[MULTIPLIER] = [multiplier.view(-1).float()]
        outputs: list[Any] = [
            None if output is None else torch.empty(run.numel, dtype=output.dtype, device="cpu")
            for run, output in zip(runs, map(lists.output.__getitem__, owners), strict=True)
        ]
        noise = lists.noise and [
            replace(lists.noise[run.owner], start=lists.noise[run.owner].start + run.start)
            for run in runs
        ]
        weight = lists.average_weight
        sample = TensorLists([], [], {}, outputs, noise, average_weight=weight)
        bring = partial(_brought, transfer=self._transfer(launch.device))
        check = partial(
            Check,
            partial(_repeated, rule, sample, scalars, multiplier),
            bring(given),
            places=[(slots[run.owner], firsts[run.owner] + run.start) for run in runs],
            sizes=[run.numel for run in runs],
            main="param" if all(output is None for output in outputs) else "main_param",
            step=launch.step,
            is_on_host=launch.device.type == "cpu",
        )

        @in_own_modes
        def written() -> None:
            written_to = {MAIN: lists.main, **lists.state, OUTPUT: lists.output}
            self._pending.append(check(found=bring(_copies(written_to, runs))))

        return written

    def _transfer(self, device: torch.device) -> Transfer | None:
        if device.type == "cpu":
            return None
        if device not in self._transfers:
            self._transfers[device] = transfer_for(device)
        return self._transfers[device]

    @in_own_modes
    def report(self, wait: bool = False) -> None:
        """Compare the samples of a finished step with their repetitions.

        Samples on an accelerator are compared after the next step, because by then their copies are
        usually complete and the host need not wait.

        Args:
            wait: True to wait for all samples and compare them now.

        Raises:
            AuditError: bits differ, and the action is ``raise``.
        """
        due, self._on_the_way = self._on_the_way, []
        while self._pending:
            check = self._pending.popleft()
            (due if wait or check.is_on_host else self._on_the_way).append(check)
        found: list[Mismatch] = []
        for check in due:
            wrong = list(check.mismatches(self._name_of))
            if wrong and torch_threads_flush():
                warn(AuditWarning(f"audit_rate={self.rate!r}: {_FLUSHED}", []))
                continue
            found += wrong
            self.elements += sum(check.sizes)
        if not found:
            return
        self.mismatches += len(found)
        shown = "; ".join(map(str, found[:MOST_NAMED]))
        more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        message = (
            f"audit_rate={self.rate!r}: {len(found)} value(s) differ from the repetition: "
            f"{shown}{more}. A core, memory or the accelerator is faulty (docs/audit.md). Load the "
            "last checkpoint from before this step"
        )
        if self.action == "raise":
            raise AuditError(message, found)
        warn(AuditWarning(message, found))

    def forget(self) -> None:
        """Discard samples of an interrupted step."""
        self._pending.clear()
        self._on_the_way.clear()

    def metrics(self) -> dict[str, float]:
        """Return the numbers of compared elements and of mismatches so far."""
        return {"audited_elements": self.elements, "audit_mismatches": self.mismatches}


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _copies(columns: Mapping[str, Sequence[Tensor | None]], runs: Sequence[Run]) -> Pieces:
    """Return copies of the runs' elements of each tensor, on the tensors' device."""
    copies: Pieces = {}
    for key, tensors in columns.items():
        of_runs = [(tensors[run.owner], run) for run in runs]
        copies[key] = [
            None if each is None else part_of_state(key, each, run.start, run.numel).clone()
            for each, run in of_runs
        ]
    return copies


def _brought(pieces: Pieces, transfer: Transfer | None) -> Callable[[], Pieces]:
    """Start to copy pieces to the host in one transfer, and return a function that waits for the
    copies.

    Pieces on the host are not copied.
    """
    if transfer is None:
        return lambda: pieces
    every = [
        (each.itemsize, key, at)
        for key, some in pieces.items()
        for at, each in enumerate(some)
        if each is not None
    ]
    # Sort by element size, so that each piece is aligned in the common buffer.
    every.sort(reverse=True)
    forms = [(pieces[key][at].nbytes, pieces[key][at].dtype) for _, key, at in every]
    empty: Pieces = {key: [None] * len(some) for key, some in pieces.items()}
    come = fetch(transfer, torch.cat([pieces[key][at].view(torch.uint8) for _, key, at in every]))

    def value() -> Pieces:
        parts = torch.split(come(), [nbytes for nbytes, _ in forms])
        for (_, key, at), part, (_, dtype) in zip(every, parts, forms, strict=True):
            empty[key][at] = part.view(dtype)
        return empty

    return value


def _repeated(
    rule: str, sample: TensorLists, scalars: Any, multiplier: Any, given: Pieces
) -> Pieces:
    """Step copies of a sample, and return the written tensors; the unchanged copies if the device
    skipped the step."""
    if MULTIPLIER in given:
        multiplier, *skips = given.pop(MULTIPLIER)[0].tolist()
        if skips and skips[0] != 0.0:
            return given
    grads, mains = given.pop(GRAD), given.pop(MAIN)
    continue_from(mains, given.pop(OUTPUT, [None] * len(mains)))
    lists = replace(sample, main=mains, grad=grads, state=given)
    _REFERENCE.step(rule, lists, scalars, multiplier)
    return {MAIN: mains, OUTPUT: list(sample.output), **given}


def _differing(found: Tensor, expected: Tensor) -> list[int]:
    """Return the indices of the elements with other bits than expected. Two NaNs count as equal
    (docs/numerics.md)."""
    bits = _BITS_OF_SIZE[found.itemsize]
    differ = found.view(bits) != expected.view(bits)
    if found.is_floating_point():
        differ &= ~(found.isnan() & expected.isnan())
    indices: list[int] = differ.nonzero().view(-1).tolist()
    return indices


def _bits_of(number: Tensor) -> int:
    bits = int(number.view(_BITS_OF_SIZE[number.itemsize]))
    return bits % (1 << 8 * number.itemsize)


def _element_of(key: str, dtype: torch.dtype, index: int) -> int:
    """Return the index in a run of the first element that a stored number encodes.

    Args:
        key: key of the state tensor.
        dtype: dtype of the state tensor.
        index: index of the number in the run's part of the tensor.
    """
    if is_scale(key):
        return index * BLOCK
    if is_packed(key, dtype):
        return index // (PACKED // 2) * PACKED + index % (PACKED // 2)
    return index
