"""What stands in for ``torch.cuda`` while a simulation runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mp_optim.placement import worker as product_worker
from mp_optim.update.backends.native_library import NativeLibrary
from support.accelerator import launches, threads
from support.accelerator.operations import Operations
from support.accelerator.simulation import Simulation
from support.accelerator.streams import Pace, Stream


class CudaStream:
    """``torch.cuda.Stream``."""

    def __init__(self, simulation: Simulation, core: Stream) -> None:
        self._simulation, self.core = simulation, core

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.core.device)

    def _use(self, what: str) -> None:
        self._simulation.check_device(self.core.device, f"{what} of a stream")

    def record_event(self, event: CudaEvent | None = None) -> CudaEvent:
        event = CudaEvent(self._simulation) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: CudaEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: CudaStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        with self._simulation.lock:
            self._use("synchronize")
            self._simulation.finish(self.core)


class CudaEvent:
    """``torch.cuda.Event``: a place in a stream, and all that is done when that is reached."""

    def __init__(self, simulation: Simulation, **_: Any) -> None:
        self._simulation = simulation
        self._recorded: tuple[Stream, int, dict[str, int]] | None = None

    def record(self, stream: CudaStream | None = None) -> None:
        simulation = self._simulation
        with simulation.lock:
            core = _current(simulation, None) if stream is None else stream.core
            simulation.check_device(core.device, "an event recorded on a stream")
            core.learn(simulation.thread.clock)
            self._recorded = core, core.queued, dict(core.clock)

    def wait(self, stream: CudaStream | None = None) -> None:
        simulation = self._simulation
        with simulation.lock:
            core = _current(simulation, None) if stream is None else stream.core
            simulation.check_device(core.device, "a wait in a stream")
            if self._recorded is not None:
                source, count, clock = self._recorded
                core.learn(clock)
                core.add(None, [(source, count)])

    def synchronize(self) -> None:
        simulation = self._simulation
        with simulation.lock:
            if self._recorded is not None:
                simulation.check_device(self._recorded[0].device, "an event waited for")
                simulation.wait_for(*self._recorded)

    def query(self) -> bool:
        simulation = self._simulation
        with simulation.lock:
            if self._recorded is None:
                return True
            source, count, clock = self._recorded
            simulation.check_device(source.device, "an event looked at")
            if source.done < count:
                return False
            simulation.thread.learn(clock)
            return True


def _index(simulation: Simulation, device: Any) -> int:
    if device is None:
        return simulation.thread.device
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return simulation.thread.device if index is None else index


def _current(simulation: Simulation, device: Any) -> Stream:
    return simulation.thread.streams[_index(simulation, device)]


def _torch_cuda(simulation: Simulation) -> dict[str, Any]:
    """What the product may use of ``torch.cuda``, by name."""

    def new_stream(device: Any = None, **_: Any) -> CudaStream:
        return CudaStream(simulation, simulation.new_stream(_index(simulation, device)))

    @contextmanager
    def device(place: Any) -> Iterator[None]:
        thread = simulation.thread
        before, thread.device = thread.device, _index(simulation, place)
        try:
            yield
        finally:
            thread.device = before

    @contextmanager
    def stream(chosen: CudaStream) -> Iterator[None]:
        thread, place = simulation.thread, chosen.core.device
        simulation.check_device(place, "a stream made current")
        device_before, thread.device = thread.device, place
        before, thread.streams[place] = thread.streams[place], chosen.core
        try:
            yield
        finally:
            thread.streams[place], thread.device = before, device_before

    def set_device(place: Any) -> None:
        simulation.thread.device = _index(simulation, place)

    return {
        "Stream": new_stream,
        "Event": lambda **settings: CudaEvent(simulation, **settings),
        "current_stream": lambda place=None: CudaStream(simulation, _current(simulation, place)),
        "stream": stream,
        "device": device,
        "set_device": set_device,
        "is_initialized": lambda: True,
        "current_device": lambda: simulation.thread.device,
        "synchronize": lambda place=None: simulation.synchronize(),
    }


# -- tensors --------------------------------------------------------------------------------------


def _record_stream(simulation: Simulation) -> Callable[[Tensor, CudaStream], None]:
    def record_stream(tensor: Tensor, stream: CudaStream) -> None:
        with simulation.lock:
            region = simulation.memory.of(tensor)
            if region is not None:
                region.recorded.add(stream.core.name)

    return record_stream


def _to_list(simulation: Simulation, original: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def tolist(tensor: Tensor) -> Any:
        return original(tensor.clone())  # an operation, which waits if it has to

    return tolist


# -- all of it ------------------------------------------------------------------------------------


@contextmanager
def simulated_accelerator(pace: Pace = Pace.LAZY, seed: int = 0) -> Iterator[Simulation]:
    """Have two simulated devices in place of ``torch.cuda``; the second is the caller's current
    one."""
    simulation = Simulation(pace, seed)
    with ExitStack() as context:
        for name, value in _torch_cuda(simulation).items():
            context.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, value in {
            "record_stream": _record_stream(simulation),
            "tolist": _to_list(simulation, Tensor.tolist),
        }.items():
            context.enter_context(mock.patch.object(Tensor, name, value, create=True))
        call = launches.replacement(simulation, NativeLibrary.call)
        context.enter_context(mock.patch.object(NativeLibrary, "call", call))
        context.enter_context(
            mock.patch.object(product_worker, "threading", threads.stand_in(simulation))
        )
        context.enter_context(Operations(simulation))
        simulation.thread.device = 1
        yield simulation
        simulation.synchronize()
