"""Backward passes in two threads, as autograd runs them for a CPU and an accelerator."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Narrow:
    """Counts the threads that are in a block at once. Each thread stays for a while, so that a
    second thread without a lock is seen.

    Attributes:
        most: largest number of threads at once.
    """

    def __init__(self, seconds: float = 0.1) -> None:
        self._seconds, self._met = seconds, threading.Condition()
        self._inside = self.most = 0

    def passes(self) -> None:
        with self._met:
            self._inside += 1
            self.most = max(self.most, self._inside)
            self._met.notify_all()
            self._met.wait_for(lambda: self._inside > 1, self._seconds)
            self._inside -= 1

    def wait_until_taken(self) -> None:
        """Wait until a thread is in the block."""
        with self._met:
            assert self._met.wait_for(lambda: self._inside > 0, 10.0)


def backward_in_two_threads(first: nn.Sequential, second: nn.Sequential, place: Narrow) -> None:
    """Run backward through two stacks of layers at once, in two threads.

    The caller's thread starts and ends in the last layer of the first stack. Gradients of the
    second stack arrive while the caller is in the block.
    """
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        started.wait()
        try:
            place.wait_until_taken()
            work()
        except BaseException as error:
            failures.append(error)

    started = threading.Event()
    loss = second(torch.ones(1, 2)).sum()
    thread = threading.Thread(target=run, args=[loss.backward])
    inputs = torch.ones(1, 2, requires_grad=True)
    hidden = first[:-1](inputs)
    hidden.register_hook(_after(started.set))
    inputs.register_hook(_after(thread.join))
    thread.start()
    first[-1](hidden).sum().backward()
    assert not failures, failures


def _after(work: Callable[[], object]) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        work()

    return hook
