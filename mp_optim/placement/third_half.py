"""A third memory beside the two halves of a double buffer, while a background save reads one.

A step that is about to write the half that is read would have to copy it first, all at once and
into memory that the system still has to give. Instead it writes the third, which a thread made
ready during the step before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from mp_optim.placement.host_bytes import back_buffer_bytes
from mp_optim.process.background_calls import in_background
from mp_optim.process.host_memory import Block, touch


class MemoryMaker:
    """Asks the system for memory in one thread, a piece at a time.

    Args:
        empty_host: makes host memory of so many bytes, page-locked or not.
    """

    def __init__(self, empty_host: Callable[[int, bool], Tensor]) -> None:
        self._empty_host = empty_host
        self._lock = threading.Lock()
        self._asked: deque[tuple[Future[Tensor], int, bool]] = deque()
        self._is_making = False

    def ask(self, num_bytes: int, pin: bool) -> Future[Tensor]:
        """Memory whose pages are there."""
        made: Future[Tensor] = Future()
        with self._lock:
            self._asked.append((made, num_bytes, pin))
            begins, self._is_making = not self._is_making, True
        if begins:
            in_background(self._make)
        return made

    def _make(self) -> None:
        while (asked := self._next()) is not None:
            made, num_bytes, pin = asked
            try:
                memory = self._empty_host(num_bytes, pin)
                touch(memory)
            except BaseException as error:  # whoever waits for it copies instead
                made.set_exception(error)
            else:
                made.set_result(memory)

    def _next(self) -> tuple[Future[Tensor], int, bool] | None:
        with self._lock:
            self._is_making = bool(self._asked)
            return self._asked.popleft() if self._asked else None


class ThirdHalf:
    """Room for tensors that are like some others.

    Args:
        tensors: that it is to have room for.
        pin: page-lock it.
    """

    def __init__(
        self, maker: MemoryMaker, tensors: Iterable[Tensor], pin: bool
    ) -> None:
        size = back_buffer_bytes(tensors)
        self._made = maker.ask(size, pin)
        self._block = Block(size, partial(_result_of, self._made))

    def like(self, tensor: Tensor) -> Tensor | None:
        """Memory for a tensor of this shape and dtype; waits until it is made. None if there is
        none left, or the system gave none."""
        is_full = back_buffer_bytes([tensor]) > self._block.left
        if is_full or self._made.exception() is not None:
            return None
        return self._block.take(tensor.shape, tensor.dtype)


def _result_of(made: Future[Tensor], num_bytes: int) -> Tensor:
    return made.result()
