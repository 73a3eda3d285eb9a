"""The simulation: devices, host threads, their operations, and reports of faults."""

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from support.accelerator.clocks import Actor
from support.accelerator.memory import POISON, Deed, Memory, Region
from support.accelerator.streams import Executor, Pace, Stream

DEVICES = 2
KIND = "privateuseone"
"""The device type that torch reserves for accelerators outside of torch."""

COLLECTIVES = f"cpu:gloo,{KIND}:gloo"
"""Backends of a process group that serves the host and the simulated devices."""


def device_at(index: int) -> torch.device:
    return torch.device(KIND, index)


class HostThread(Actor):
    """A thread of the host.

    Attributes:
        device: index of its current device.
        streams: its current stream on each device.
    """

    def __init__(self, name: str, defaults: list[Stream]) -> None:
        super().__init__(name)
        self.device = 0
        self.streams = list(defaults)


class Simulation:
    """Devices, streams and memory of one simulation.

    Attributes:
        empty: device of tensors without memory.
        reports: faults, each once.
        torn: downloads with a concurrent write.
        lock: guards the whole simulation.
    """

    def __init__(self, pace: Pace = Pace.LAZY, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.reports: dict[str, None] = {}
        self.torn: dict[str, None] = {}
        self.memory = Memory()
        self.empty = WeakTensorKeyDictionary()
        self.executor = Executor(pace, seed)
        self._threads: dict[threading.Thread, HostThread] = {}
        self._defaults = [self.new_stream(device) for device in range(DEVICES)]
        self._lent: list[Region] = []

    def new_stream(self, device: int) -> Stream:
        with self.lock:
            stream = Stream(f"stream {len(self.executor.streams)} of {device_at(device)}", device)
            self.executor.streams.append(stream)
            return stream

    @property
    def thread(self) -> HostThread:
        with self.lock:
            key = threading.current_thread()
            if key not in self._threads:
                name = f"thread {len(self._threads)} ({key.name})"
                self._threads[key] = HostThread(name, self._defaults)
            return self._threads[key]

    @property
    def current_stream(self) -> Stream:
        return self.thread.streams[self.thread.device]

    def report(self, problem: str) -> None:
        self.reports[problem] = None

    def check_device(self, device: int, what: str) -> None:
        if self.thread.device != device:
            self.report(
                f"{what} of {device_at(device)} in {self.thread.name}, whose current device is "
                f"{device_at(self.thread.device)}"
            )

    def queue(self, stream: Stream, run: Callable[[], None], deed: Deed) -> None:
        """Queue an operation on a stream from the calling thread."""
        self.look_for_given_back()
        stream.learn(self.thread.clock)
        self._note(stream, deed)
        mode = torch.is_inference_mode_enabled()
        stream.add(lambda: self._carry_out(run, mode))
        self.executor.stir()

    def do(self, deed: Deed) -> None:
        self.look_for_given_back()
        self._note(self.thread, deed)
        self.executor.stir()

    def _note(self, actor: Actor, deed: Deed) -> None:
        moment = actor.tick()
        for span, writes in deed.spans:
            region = span.region
            for message, is_torn in region.touch(actor, moment, span, writes, deed):
                (self.torn if is_torn else self.reports)[message] = None
            if region.is_given_back:
                self.report(f"{deed.what} on {actor.name} uses memory that was given back")
            if isinstance(actor, Stream) and actor is not region.home:
                self._lent.append(region)

    @staticmethod
    def _carry_out(run: Callable[[], None], mode: bool) -> None:
        with _disable_current_modes(), torch.inference_mode(mode), torch.no_grad():
            run()

    def wait_for(self, stream: Stream, count: int, clock: Mapping[str, int]) -> None:
        self.executor.reach(stream, count)
        self.thread.learn(clock)

    def finish(self, stream: Stream) -> None:
        self.wait_for(stream, stream.queued, stream.clock)

    def look_for_given_back(self) -> None:
        """Find memory that the package freed, and overwrite memory that other code may reuse."""
        lent, self._lent = self._lent, []
        for region in dict.fromkeys(lent):
            if not region.is_let_go:
                self._lent.append(region)
            elif not region.is_given_back:
                region.is_given_back = True
                self._give_back(region)

    def _give_back(self, region: Region) -> None:
        allowed = region.recorded if region.device is not None else region.guarded
        witnesses: list[Actor] = [region.home] if region.home is not None else []
        witnesses += self._threads.values()
        for access in region.accesses:
            is_known = any(actor.knows(access.actor, access.moment) for actor in witnesses)
            if is_known or access.actor in allowed:
                continue
            self.report(
                f"memory of {region.size} bytes was given back while it may be under way: {access}"
            )
            self._use_for_something_else(region)

    @staticmethod
    def _use_for_something_else(region: Region) -> None:
        def write() -> None:
            region.bytes().fill_(POISON)

        if isinstance(region.home, Stream):
            region.home.add(write)
        else:
            write()

    def to_device(self, tensor: Tensor, device: int) -> Tensor:
        with self.lock:
            region = self.memory.of(tensor)
            if region is None:
                self.empty[tensor] = device
            else:
                region.device, region.home = device, self._defaults[device]
                region.is_page_locked = False
        return tensor

    def synchronize(self) -> None:
        """Wait for all queued operations."""
        with self.lock:
            self.look_for_given_back()
            for stream in self.executor.streams:
                self.finish(stream)
