"""Calls that may never return, made by threads that wait for the next one afterwards.

A thread that comes to its end just when the process does takes apart what is its own while the rest
is taken apart, which aborts the process now and then. One that waits for work is simply gone with
it. So these never end.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Thread:
    """A daemon thread with one call at a time."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = (
            queue.SimpleQueue()
        )
        self.pid = os.getpid()
        threading.Thread(
            target=self._serve, name="mp_optim-background", daemon=True
        ).start()

    def _serve(self) -> None:
        while True:
            _carry_out(*self.calls.get())
            _idle.append(self)


def _carry_out(result: Future[T], work: Callable[[], T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:  # the caller that waits for it raises it
        result.set_exception(error)


_idle: list[_Thread] = []


def in_background(work: Callable[[], T]) -> Future[T]:
    """Begin a call in a thread of its own; what it returns or raises is the future's."""
    result: Future[T] = Future()
    while _idle:
        thread = _idle.pop()
        if thread.pid == os.getpid():  # a forked child has none of its parent's threads
            break
    else:
        thread = _Thread()
    thread.calls.put((result, work))
    return result
