"""The simulation as an accelerator of the package: an entry of
:data:`~mp_optim.host.accelerator.KINDS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mp_optim.host import leases
from mp_optim.host.accelerator import KINDS, Accelerator
from mp_optim.kernels import selection
from mp_optim.kernels.native_library import NativeLibrary
from mp_optim.kernels.reference import Backend
from mp_optim.kernels.self_test import SelfTest, prove
from mp_optim.kernels.sums import index_on
from mp_optim.mixed_precision import clip_and_skip as verdict
from mp_optim.offload import backward_scheduler
from support.accelerator import launches, threads
from support.accelerator.devices import Devices
from support.accelerator.operations import Operations
from support.accelerator.simulation import KIND, Simulation, device_at
from support.accelerator.streams import Pace, Stream


class SimulatedStream:
    """A simulated stream with the methods of ``torch.Stream``."""

    def __init__(self, simulation: Simulation, core: Stream) -> None:
        self._simulation, self.core = simulation, core

    @property
    def device(self) -> torch.device:
        return device_at(self.core.device)

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(self._simulation)
        event.record(self)
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: SimulatedStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        with self._simulation.lock:
            self._simulation.check_device(self.core.device, "synchronize of a stream")
            self._simulation.finish(self.core)


class SimulatedEvent:
    """A simulated event with the methods of ``torch.Event``: a position in a stream."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._recorded: tuple[Stream, int, dict[str, int]] | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        simulation = self._simulation
        with simulation.lock:
            core = simulation.current_stream if stream is None else stream.core
            simulation.check_device(core.device, "an event recorded on a stream")
            core.learn(simulation.thread.clock)
            self._recorded = core, core.queued, dict(core.clock)

    def wait(self, stream: SimulatedStream) -> None:
        simulation = self._simulation
        with simulation.lock:
            simulation.check_device(stream.core.device, "a wait in a stream")
            if self._recorded is not None:
                source, count, clock = self._recorded
                stream.core.learn(clock)
                stream.core.add(None, [(source, count)])

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


class SimulatedAccelerator(Accelerator):
    """An accelerator kind with the simulation's devices."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(KIND)
        self._simulation = simulation

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        thread = self._simulation.thread
        before, thread.device = thread.device, device.index
        try:
            yield
        finally:
            thread.device = before

    def stream(self, device: torch.device) -> Any:
        return SimulatedStream(self._simulation, self._simulation.new_stream(device.index))

    def current_stream(self) -> Any:
        return SimulatedStream(self._simulation, self._simulation.current_stream)

    @contextmanager
    def queue_on(self, stream: Any) -> Iterator[None]:
        thread, place = self._simulation.thread, stream.core.device
        self._simulation.check_device(place, "a stream made current")
        before, thread.streams[place] = thread.streams[place], stream.core
        try:
            with self.on(stream.device):
                yield
        finally:
            thread.streams[place] = before

    def event(self, sleeps: bool = False) -> Any:
        return SimulatedEvent(self._simulation)

    def synchronize(self) -> None:
        self._simulation.synchronize()

    def is_capturing(self) -> bool:
        return False

    def register(self, address: int, num_bytes: int) -> str | None:
        return "a simulation registers none"


def _record_stream(simulation: Simulation) -> Callable[[Tensor, SimulatedStream], None]:
    def record_stream(tensor: Tensor, stream: SimulatedStream) -> None:
        with simulation.lock:
            region = simulation.memory.of(tensor)
            if region is not None:
                region.recorded.add(stream.core.name)

    return record_stream


def _to_list(simulation: Simulation, original: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def tolist(tensor: Tensor) -> Any:
        # clone() and cpu() wait for the device
        return original(tensor.clone() if tensor.is_cpu else tensor.cpu())

    return tolist


def _hooked(simulation: Simulation, original: Callable[..., Any]) -> Callable[..., Any]:
    def register(tensor: Tensor, hook: Callable[[Tensor], None]) -> Any:
        def call(param: Tensor) -> None:
            with Devices(simulation):
                hook(param)

        with torch._C.DisableTorchFunction():  # Otherwise the call would recurse.
            return original(tensor, call)

    return register


def _taken_for_right(backend: Backend, device: torch.device) -> SelfTest:
    if device.type != KIND:
        return prove(backend, device)
    return SelfTest(backend.name, str(device), True, True, "")


_KEPT_BY_DEVICE = (leases.windows_of, verdict._transfer, index_on)
"""Caches per device that have to be cleared with the simulation."""


@contextmanager
def simulated_accelerator(pace: Pace = Pace.LAZY, seed: int = 0) -> Iterator[Simulation]:
    """Simulate two devices; the second device is the caller's current device."""
    simulation = Simulation(pace, seed)
    with ExitStack() as context:
        for kept in _KEPT_BY_DEVICE:
            context.callback(kept.cache_clear)
        kind = {KIND: SimulatedAccelerator(simulation)}
        context.enter_context(mock.patch.dict(KINDS, kind))
        only = mock.patch.object(selection, "_ON_ACCELERATOR", ("reference",))
        context.enter_context(only)  # Only the reference: proving other backends is slow here.
        context.enter_context(mock.patch.object(selection, "prove", _taken_for_right))
        for name, value in {
            "record_stream": _record_stream(simulation),
            "tolist": _to_list(simulation, Tensor.tolist),
            "register_post_accumulate_grad_hook": _hooked(
                simulation, Tensor.register_post_accumulate_grad_hook
            ),
        }.items():
            context.enter_context(mock.patch.object(Tensor, name, value, create=True))
        call = launches.replacement(simulation, NativeLibrary.call)
        context.enter_context(mock.patch.object(NativeLibrary, "call", call))
        pool = partial(threads.Pool, simulation)
        context.enter_context(mock.patch.object(backward_scheduler, "DaemonExecutor", pool))
        stand_in = threads.stand_in(simulation)
        context.enter_context(mock.patch.object(leases, "threading", stand_in))
        # The simulation records this copy.
        context.enter_context(mock.patch.object(leases, "move", Tensor.copy_))
        context.enter_context(Operations(simulation))
        context.enter_context(Devices(simulation))
        simulation.thread.device = 1
        yield simulation
        simulation.synchronize()
