"""Windows of state that lies in a file: read ahead into host memory, written back behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mp_optim.checkpoint.blocks import BLOCK as ELEMENTS
from mp_optim.placement.state_file import StateFile, blocks_bytes
from mp_optim.placement.timeline import WAIT_DISK, StepTimeline
from mp_optim.placement.window_ring import view_of
from mp_optim.placement.windows import (
    GRAD,
    OUTPUT,
    Piece,
    Tensors,
    Window,
    WindowForm,
    block_bytes,
)
from mp_optim.process.direct_file import BLOCK, Ticket
from mp_optim.process.host_memory import Form, aligned_bytes
from mp_optim.process.leases import before_writing
from mp_optim.update.kernel_args import TensorLists

AHEAD, BEHIND = 1, 2
"""Windows that are read before the next is needed; windows that may still be written."""


def windows_held(lag: int) -> int:
    """How many windows are in host memory at a time: one is written for each of ``BEHIND``, one
    comes, and those before it are stepped or on their way back."""
    return AHEAD + 1 + lag + BEHIND


class DiskForm(WindowForm):
    """Main params and state as they lie in the file, so that neighbours are one transfer.

    Args:
        is_staged: gradients and outputs come along.
    """

    def __init__(self, is_staged: bool) -> None:
        self.is_staged = is_staged

    def forms_bytes(self, forms: Iterable[Form]) -> int:
        """What main params and state of these forms take, whole blocks of the file."""
        return sum(blocks_bytes(shape.numel() * d.itemsize) for shape, d in forms)

    def beside(self, lists: TensorLists, index: int) -> Tensors:
        """Gradient and output of a tensor of a launch."""
        if not self.is_staged:
            return {}
        output = lists.output[index]
        written = {} if output is None else {OUTPUT: output}
        return {GRAD: lists.grad[index], **written}

    def elements_that_fit(self, held: Tensors, beside: Tensors, most: int) -> int:
        """Of one tensor: so many that all of its state is cut between two blocks of the file."""
        elements, num_bytes = cuts({key: each.dtype for key, each in held.items()})
        num_bytes += sum(elements * each.itemsize for each in beside.values())
        return max(1, most // num_bytes) * elements

    def bytes_of(self, held: Tensors, beside: Tensors) -> int:
        """What they take in a window."""
        staged = (aligned_bytes(each.numel(), each.dtype) for each in beside.values())
        return super().bytes_of(held, beside) + sum(staged)


def cuts(dtypes: Mapping[str, torch.dtype]) -> tuple[int, int]:
    """A tensor with main param and state of these dtypes is cut at multiples of so many elements,
    which take so many bytes: whole blocks of the file for each."""
    sizes = [block_bytes(key, dtype) for key, dtype in dtypes.items()]
    count = max(1, BLOCK // min(sizes))
    return count * ELEMENTS, count * sum(sizes)


@dataclass
class _Extent:
    """Neighbouring blocks of the file, and their memory."""

    offset: int
    memory_from: int
    size: int


class DiskWindows:
    """Windows of one step: a :class:`~mp_optim.placement.window_source.WindowSource`.

    NOTE: no two windows have a block of the file in common, so one can be read while the one before
    is written. A window's memory is read into again only after it was written.

    Args:
        windows: of the step; tensors that do not lie in the file are used where they are.
        lanes: memory for one window each, at least :func:`windows_held` of them.

    Attributes:
        read, written: bytes of the file.
    """

    def __init__(
        self,
        file: StateFile,
        windows: Sequence[Window],
        lanes: Sequence[Tensor],
        timeline: StepTimeline,
    ) -> None:
        self._file, self._windows, self._lanes = file, windows, lanes
        self._timeline = timeline
        self._begun: list[tuple[Window, list[_Extent]]] = []
        self._reads: dict[int, list[Ticket]] = {}
        self._writes: dict[int, list[Ticket]] = {}
        self.read = self.written = 0

    def fetch(self, number: int) -> Window:
        """See :class:`~mp_optim.placement.window_source.WindowSource`."""
        last = min(number + AHEAD, len(self._windows) - 1)
        while len(self._begun) <= last:
            self._begin(len(self._begun))
        self._wait(self._reads.pop(number, ()))
        return self._begun[number][0]

    def store(self, number: int) -> None:
        """See :class:`~mp_optim.placement.window_source.WindowSource`."""
        for piece in self._windows[number]:
            before_writing(piece.held.values())
        memory, extents = self._lane(number), self._begun[number][1]
        tickets = self._writes.setdefault(number, [])
        for extent in extents:
            part = memory[extent.memory_from :][: extent.size]
            tickets.append(self._file.write_from(part, extent.offset))
            self.written += extent.size

    def finish(self) -> None:
        """See :class:`~mp_optim.placement.window_source.WindowSource`."""
        under_way = [*self._reads.values(), *self._writes.values()]
        self._reads, self._writes = {}, {}
        self._wait(itertools.chain.from_iterable(under_way))

    def _begin(self, number: int) -> None:
        """Start to read a window, once what was there before is in the file."""
        self._wait(self._writes.pop(number - len(self._lanes), ()))
        memory = self._lane(number)
        window, extents = _laid_out(self._windows[number], self._file, memory)
        self._begun.append((window, extents))
        tickets = self._reads.setdefault(number, [])
        for extent in extents:
            part = memory[extent.memory_from :][: extent.size]
            tickets.append(self._file.read_into(part, extent.offset))
            self.read += extent.size

    def _lane(self, number: int) -> Tensor:
        return self._lanes[number % len(self._lanes)]

    def _wait(self, tickets: Iterable[Ticket]) -> None:
        """Wait for all of them, whatever comes of each; then raise what one did."""
        failed = []
        with self._timeline.stage(WAIT_DISK):
            for ticket in tickets:
                try:
                    ticket.wait()
                except OSError as error:
                    failed.append(error)
        if failed:
            raise failed[0]


def _laid_out(
    window: Window, file: StateFile, memory: Tensor
) -> tuple[Window, list[_Extent]]:
    """The window with tensors in a lane's memory, and what of the file that is."""
    found = []
    for index, piece in enumerate(window):
        for key, tensor in piece.held.items():
            if (offset := file.offset_of(tensor)) is not None:
                found.append((offset, index, key, tensor))
    held = [dict(piece.held) for piece in window]
    extents: list[_Extent] = []
    used = 0
    for offset, index, key, tensor in sorted(found, key=lambda each: each[0]):
        held[index][key] = view_of(memory, used, (tensor.shape, tensor.dtype))
        size = blocks_bytes(tensor.nbytes)
        if extents and extents[-1].offset + extents[-1].size == offset:
            extents[-1].size += size
        else:
            extents.append(_Extent(offset, used, size))
        used += size
    pieces = []
    for piece, tensors in zip(window, held, strict=True):
        beside, used = _staged(piece, memory, used)
        pieces.append(replace(piece, held=tensors, beside=beside))
    return pieces, extents


def _staged(piece: Piece, memory: Tensor, used: int) -> tuple[Tensors, int]:
    """Memory for what comes along with a piece, and the bytes that are used then."""
    tensors = {}
    for key, each in piece.beside.items():
        tensors[key] = view_of(memory, used, (each.shape, each.dtype))
        used += aligned_bytes(each.numel(), each.dtype)
    return tensors, used
