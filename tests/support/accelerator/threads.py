"""Threads and locks that pass on vector clocks. A new thread takes the clock of its starter, and a
thread that acquires a lock takes the clock of the thread that released it."""

import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

from mp_optim.host.calls import DaemonExecutor
from support.accelerator.clocks import Actor
from support.accelerator.devices import Devices
from support.accelerator.operations import Operations
from support.accelerator.simulation import Simulation


class Thread(threading.Thread):
    def __init__(self, simulation: Simulation, **settings: Any) -> None:
        super().__init__(**settings)
        self._simulation = simulation
        self._known: dict[str, int] = {}

    def start(self) -> None:
        self._known = dict(self._simulation.thread.clock)
        super().start()

    def run(self) -> None:
        self._simulation.thread.learn(self._known)
        with Operations(self._simulation), Devices(self._simulation):
            super().run()


class Lock:
    """A ``threading.Lock`` or ``RLock`` that passes on clocks."""

    def __init__(self, simulation: Simulation, lock: Any) -> None:
        self._simulation, self._lock = simulation, lock
        self._holders = Actor("a lock")

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            self._learn()
        return taken

    def release(self) -> None:
        self._teach()
        self._lock.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: Any) -> None:
        self.release()

    def _learn(self) -> None:
        with self._simulation.lock:
            self._simulation.thread.learn(self._holders.clock)

    def _teach(self) -> None:
        with self._simulation.lock:
            self._holders.learn(self._simulation.thread.clock)

    # Methods of an RLock that a Condition calls.

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> Any:
        self._teach()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        self._learn()


class Pool(DaemonExecutor):
    def __init__(self, simulation: Simulation, *settings: Any) -> None:
        super().__init__(*settings)
        self._simulation = simulation

    def submit(self, work: Any, /, *args: Any, **more: Any) -> Future[Any]:
        simulation = self._simulation
        begun, ended = dict(simulation.thread.clock), Actor("a job")

        def seen() -> Any:
            with simulation.lock:
                simulation.thread.learn(begun)
            try:
                with Operations(simulation), Devices(simulation):
                    return work(*args, **more)
            finally:
                with simulation.lock:
                    ended.learn(simulation.thread.clock)

        future = super().submit(seen)
        error_of = future.exception

        def exception(timeout: float | None = None) -> BaseException | None:
            error = error_of(timeout)
            with simulation.lock:
                simulation.thread.learn(ended.clock)
            return error

        future.exception = exception  # type: ignore[method-assign]
        return future


def stand_in(simulation: Simulation) -> SimpleNamespace:
    names = {name: getattr(threading, name) for name in threading.__all__}
    names["Thread"] = partial(Thread, simulation)
    names["Lock"] = lambda: Lock(simulation, threading.Lock())
    names["RLock"] = lambda: Lock(simulation, threading.RLock())
    return SimpleNamespace(**names)
