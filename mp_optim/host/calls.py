"""Helpers for calls: torch's modes, background threads, warnings at the caller's line, and
callbacks without strong references."""

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
# The caller's modes must not change the package's tensors. A state tensor from
# ``torch.inference_mode()`` could never be stepped outside that mode. A tensor with a gradient
# function would keep a graph alive. Threads that flush denormal numbers would compute other bits.

_DENORMAL = 5e-324


def torch_threads_flush() -> bool:
    """True if a thread of torch's pool flushes denormal numbers to zero.

    A pool thread keeps the mode (``torch.set_flush_denormal``) of the thread that started the pool.
    """
    # The tensor is large enough that each thread of the pool multiplies a part.
    elements = torch.get_num_threads() << 16
    product = torch.full((elements,), 1e-40, dtype=torch.float32, device="cpu") * 1.0
    return bool((product.view(torch.int32) == 0).any())


def in_own_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to run without autograd, outside inference mode and with denormal
    numbers.

    The decorator changes and restores modes of the calling thread only.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        had_grad = torch.is_grad_enabled()
        flushed = _DENORMAL * 1.0 == 0.0
        # NOTE: change and restore both modes in nested try statements. Two nested context managers
        # can be interrupted between enter and exit, which would leave autograd off for the caller.
        try:
            try:
                if flushed:
                    torch.set_flush_denormal(False)
                if torch.is_inference_mode_enabled():
                    # Leaving inference mode turns autograd on, so turn autograd off again.
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
    """Return a tensor's version, which torch increases with each write; None for a tensor from
    inference mode, which has no version."""
    return None if tensor.is_inference() else tensor._version


def _tell_one_by_one(written: list[Tensor]) -> None:
    for tensor in written:
        increment_version(tensor)


tell_autograd: Callable[[list[Tensor]], None] = increment_version
"""Increase the versions of tensors that a kernel wrote, because autograd cannot detect writes of
kernels."""
try:
    increment_version([])
# Before torch 2.7, increment_version takes one tensor and no list, so call it for each tensor.
except TypeError:
    tell_autograd = _tell_one_by_one


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which matrix products on a device have the dtype of their operands, even
    inside ``torch.autocast``."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def weak_method(method: Callable[P, T]) -> Callable[P, T | None]:
    """Return a function that calls a bound method but does not keep the method's object alive.

    An optimizer passes its methods to other objects in this form. With plain bound methods, those
    objects and the optimizer would keep each other alive until the garbage collector runs. The
    function returns None if the method's object was deleted.
    """
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        present = found()
        return None if present is None else present(*args, **kwargs)

    return call


# -- warnings -------------------------------------------------------------------------------------

_INSIDE = (str(Path(__file__).parents[1]), str(Path(torch.__file__ or "").parent))


def warn(message: str | Warning) -> None:
    """Warn with the line of the innermost caller outside this package and torch.

    torch is excluded because torch wraps ``step``.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# -- background threads ---------------------------------------------------------------------------


class DaemonExecutor(Executor):
    """Executor with one daemon thread, which runs calls in order.

    NOTE: do not use ``ThreadPoolExecutor`` for calls that can hang, such as a copy from a broken
    device. A process waits for the threads of ``ThreadPoolExecutor`` at exit, so a launcher could
    not restart the rank.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Queue a call, and return a future with the call's result or error."""
        future: Future[Any] = Future()
        self._calls.put((future, functools.partial(work, *args, **more)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after the call that is running.

        Args:
            wait: True to wait for the thread's end, at most 2 seconds.
            cancel_futures: True to cancel queued calls.
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
    """Run calls from a queue until the queue yields None.

    NOTE: the thread drops its references to a call before it sets the call's result. Otherwise the
    waiting thread could delete an optimizer to which the call still refers.
    """
    # A new thread inherits its creator's denormal mode, which would change the bits, so set the
    # mode.
    torch.set_flush_denormal(False)
    while (call := calls.get()) is not None:
        future, work = call
        del call
        if not future.set_running_or_notify_cancel():
            del future, work
            continue
        result, error = None, None
        try:
            result = work()
        # Catch all errors, because Future.result() raises them in the waiting thread.
        except BaseException as raised:
            error = raised
        del work
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        del future, result, error


_idle: list[tuple[int, DaemonExecutor]] = []
"""Executors without a call, each with the id of the process that created the executor."""


def in_background(work: Callable[[], T]) -> Future[T]:
    """Start a call that may never return on a daemon thread, and return a future with the call's
    result.

    NOTE: these threads never end. A thread that exits during interpreter shutdown can abort the
    process. A daemon thread that waits for a call ends with the process.
    """
    while _idle:
        pid, pool = _idle.pop()
        # A forked child has none of its parent's threads, so skip their executors.
        if pid == os.getpid():
            break
    else:
        pool = DaemonExecutor("mp_optim-background")
    future = pool.submit(work)
    idle = os.getpid(), pool
    future.add_done_callback(lambda _: _idle.append(idle))
    return future
