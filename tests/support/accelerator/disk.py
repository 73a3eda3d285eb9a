"""A simulated disk: each transfer is a stream, and the simulation records its memory accesses."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from mp_optim.offload.state_storage import StateFile
from support.accelerator.memory import Deed
from support.accelerator.simulation import Simulation
from support.accelerator.streams import Stream


class _Ticket:
    def __init__(self, simulation: Simulation, stream: Stream) -> None:
        self._simulation, self._stream = simulation, stream
        self._reached = stream.queued, dict(stream.clock)

    def wait(self) -> None:
        with self._simulation.lock:
            self._simulation.wait_for(self._stream, *self._reached)


class _Disk:
    """The file of a :class:`StateFile` with transfers on simulated streams."""

    def __init__(self, simulation: Simulation, state: StateFile) -> None:
        self._simulation, self._state = simulation, state

    def mapped(self, offset: int, num_bytes: int) -> mmap.mmap:
        assert self._state._file is not None
        return self._state._file.mapped(offset, num_bytes)

    def read_into(self, memory: Tensor, offset: int) -> _Ticket:
        return self._begin(memory, in_file(self._state, offset, memory.numel()))

    def write_from(self, memory: Tensor, offset: int) -> _Ticket:
        return self._begin(in_file(self._state, offset, memory.numel()), memory)

    def _begin(self, to: Tensor, source: Tensor) -> _Ticket:
        simulation = self._simulation
        with simulation.lock:
            stream = simulation.new_stream(0)
            spans = [(simulation.memory.span(to), True), (simulation.memory.span(source), False)]
            deed = Deed("the disk", [each for each in spans if each[0] is not None])
            # Through the mapping: no other thread may wait for a lock that this thread holds.
            simulation.queue(stream, lambda: to.copy_(source), deed)
            return _Ticket(simulation, stream)


@contextmanager
def simulated_disk(simulation: Simulation) -> Iterator[None]:
    disk = property(lambda state: _Disk(simulation, state))
    with patch.object(StateFile, "file", disk):
        yield


def in_file(file: StateFile, offset: int, size: int) -> Tensor:
    (segment,) = [each for each in file._segments if 0 <= offset - each.begin < each.memory.numel()]
    return segment.memory[offset - segment.begin :][:size]
