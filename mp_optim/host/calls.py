"""Decorators and helpers for calls of the package: torch's modes, background threads, warnings at
the caller's line, and callbacks without strong references."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

P = ParamSpec("P")
T = TypeVar("T")

# -- modes of torch -------------------------------------------------------------------------------
#
# None that a caller is in may show in what the package makes: a state tensor allocated inside
# ``torch.inference_mode()`` could never be stepped outside of it, and one that autograd sees would
# keep a graph alive. A thread that flushes denormal numbers to zero would compute other bits.

_DENORMAL = 5e-324


def torch_threads_flush() -> bool:
    """True if a thread of torch's pool takes denormal numbers for zero: it keeps the mode that the
    thread which started it was in (torch.set_flush_denormal)."""
    elements = torch.get_num_threads() << 16  # one entry for each thread
    product = torch.full((elements,), 1e-40, dtype=torch.float32, device="cpu") * 1.0
    return bool((product.view(torch.int32) == 0).any())


def in_own_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public call to run without autograd, outside of inference mode and with denormal
    numbers kept, in any mode of the caller. Only the calling thread's modes are set; they are
    restored at the end."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        had_grad = torch.is_grad_enabled()
        flushed = _DENORMAL * 1.0 == 0.0
        # NOTE: set both by hand, one inside the other. With a context manager, an interrupt between
        # enter and exit would leave autograd off.
        try:
            try:
                if flushed:
                    torch.set_flush_denormal(False)
                if torch.is_inference_mode_enabled():
                    # leaving inference mode turns autograd on
                    with torch.inference_mode(False), torch.no_grad():
                        return function(*args, **kwargs)
                torch._C._set_grad_enabled(False)
                return function(*args, **kwargs)
            finally:
                torch._C._set_grad_enabled(had_grad)
        finally:
            if flushed:
                torch.set_flush_denormal(True)

    return call


def writes_counted(tensor: Tensor) -> int | None:
    """Return torch's count of writes; None for a tensor made in inference mode, which torch does
    not count."""
    return None if tensor.is_inference() else tensor._version


def _tell_one_by_one(written: list[Tensor]) -> None:
    for tensor in written:
        increment_version(tensor)


tell_autograd: Callable[[list[Tensor]], None] = increment_version
"""These were written where autograd cannot see it."""
try:
    increment_version([])
except TypeError:  # before torch 2.7
    tell_autograd = _tell_one_by_one


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products on a device keep the dtype of their factors."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def weak_method(method: Callable[P, T]) -> Callable[P, T | None]:
    """Return a function that calls a bound method but does not keep its object alive.

    A part of an optimizer gets its owner's methods in this form. Otherwise part and owner would
    keep each other alive until the garbage collector runs. The function returns None if the object
    is gone.
    """
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        present = found()
        return None if present is None else present(*args, **kwargs)

    return call


# -- warnings -------------------------------------------------------------------------------------

_INSIDE = (str(Path(__file__).parents[1]), str(Path(torch.__file__ or "").parent))


def warn(message: str | Warning) -> None:
    """Warn from the innermost line that is neither this package's nor torch's, which wraps
    ``step``."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# -- the background -------------------------------------------------------------------------------


class DaemonExecutor(Executor):
    """One daemon thread that runs calls in order.

    NOTE: a process that ends waits for the threads of ``ThreadPoolExecutor``, also for one that
    hangs in a copy from a dead device. A launcher could never restart that rank.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Queue a call; the future has its result or its error."""
        future: Future[Any] = Future()
        self._calls.put((future, functools.partial(work, *args, **more)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after the call in progress.

        Args:
            wait: wait for that, at most 2 seconds.
            cancel_futures: cancel the calls that are queued.
        """
        with contextlib.suppress(queue.Empty):
            while cancel_futures and (call := self._calls.get_nowait()) is not None:
                call[0].cancel()
        self._calls.put(None)
        if wait:
            self.thread.join(_END_WITHIN)


_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
_END_WITHIN = 2.0


def _serve(calls: _Calls) -> None:
    """Run the calls of a queue until it ends with None.

    NOTE: the thread drops a call before its waiter goes on. Otherwise the waiter could delete an
    optimizer that the call still refers to.
    """
    torch.set_flush_denormal(False)  # a thread inherits the mode of the one that started it
    while (call := calls.get()) is not None:
        future, work = call
        del call
        if not future.set_running_or_notify_cancel():
            del future, work
            continue
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # the future's methods raise it
            error = raised
        del work
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        del future, result, error


_idle: list[tuple[int, DaemonExecutor]] = []
"""Threads without a call, each with its process."""


def in_background(work: Callable[[], T]) -> Future[T]:
    """Start a call that may never return, on a daemon thread of its own. The future has its result
    or its error.

    NOTE: these threads never end. One that exits while the interpreter shuts down can abort the
    process; one that waits for a call is simply gone with it.
    """
    while _idle:
        pid, pool = _idle.pop()
        if pid == os.getpid():  # a forked child has none of its parent's threads
            break
    else:
        pool = DaemonExecutor("mp_optim-background")
    future = pool.submit(work)
    idle = os.getpid(), pool
    future.add_done_callback(lambda _: _idle.append(idle))
    return future
