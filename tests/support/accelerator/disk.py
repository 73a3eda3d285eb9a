"""A simulated disk: each transfer is a stream, and the simulation records its memory accesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@contextmanager
def simulated_disk(simulation: Simulation) -> Iterator[None]:
    def moved(is_read: bool) -> Callable[..., _Ticket]:
        def begin(file: StateFile, memory: Tensor, offset: int) -> _Ticket:
            with simulation.lock:
                stream = simulation.new_stream(0)
                there = in_file(file, offset, memory.numel())
                to, source = (memory, there) if is_read else (there, memory)
                spans = [
                    (simulation.memory.span(to), True),
                    (simulation.memory.span(source), False),
                ]
                deed = Deed("the disk", [each for each in spans if each[0] is not None])
                # Through the mapping: no other thread may wait for a lock that this thread holds.
                simulation.queue(stream, lambda: to.copy_(source), deed)
                return _Ticket(simulation, stream)

        return begin

    with patch.multiple(StateFile, read_into=moved(True), write_from=moved(False)):
        yield


def in_file(file: StateFile, offset: int, size: int) -> Tensor:
    (segment,) = [each for each in file._segments if 0 <= offset - each.begin < each.memory.numel()]
    return segment.memory[offset - segment.begin :][:size]
