"""Saves that go on while training does: one at a time, and no failure unheard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

_log = logging.getLogger(__name__)


class SaveHandle:
    """A save in the background.

    A process that ends waits for it; one that is killed leaves the previous checkpoint the newest.

    Attributes:
        path: the directory of the version, once it is complete.
    """

    def __init__(
        self,
        path: Path,
        work: Callable[[], object],
        device_is_free: Callable[[float | None], bool],
    ) -> None:
        self.path = path
        self._work, self._device_is_free = work, device_is_free
        self._future: Future[Path] = Future()
        self._heard = False
        self._thread = threading.Thread(
            target=self._run, name=f"saving {path.name}", daemon=False
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            _log.error("saving %s failed: %s", self.path, error)
            self._future.set_exception(error)
        else:
            self._future.set_result(self.path)
        finally:
            del self._work  # and the snapshot with it
            self._device_is_free = _at_once

    def done(self) -> bool:
        """Whether it is complete or has failed."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete.

        Args:
            timeout: seconds; None for as long as it takes.

        Returns:
            The directory of the version written.

        Raises:
            TimeoutError: it was not done in time; it goes on.
            Exception: why it failed. A failure that no call waited for is raised by the next save.
        """
        try:
            path = self._future.result(timeout)
        except BaseException:
            self._heard = self._heard or self._future.done()
            raise
        self._thread.join()
        return path

    def wait_for_device(self, timeout: float | None = None) -> None:
        """Wait until the save has copied what it reads of GPUs: from then on anybody may write the
        model's parameters. Steps of optimizers wait by themselves.

        Args:
            timeout: seconds; None for as long as it takes.

        Raises:
            TimeoutError: it was not done in time; it goes on.
        """
        if not self._device_is_free(timeout):
            raise TimeoutError(f"{self.path}: not yet copied from the device")

    def _settle(self) -> None:
        """Wait; raise a failure that was not raised yet."""
        error = self._future.exception()
        self._thread.join()
        if error is not None and not self._heard:
            self._heard = True
            raise RuntimeError(
                f"the save in the background of {self.path} failed: {error}"
            ) from error


_previous: list[SaveHandle] = []


def _at_once(timeout: float | None) -> bool:
    return True


def start(
    path: Path,
    work: Callable[[], object],
    device_is_free: Callable[[float | None], bool] = _at_once,
) -> SaveHandle:
    """Begin a save in the background; the one before has to be finished.

    Args:
        device_is_free: waits so many seconds until nothing of a device is read any more, and tells
            whether that is so.
    """
    assert not _previous, "a save is still going on"
    _previous.append(SaveHandle(path, work, device_is_free))
    return _previous[0]


def finish_previous() -> None:
    """Wait for the save in the background, if there is one.

    Raises:
        RuntimeError: it failed and no call has raised that yet.
    """
    if _previous:
        _previous.pop()._settle()


def wait_for_previous() -> None:
    """Wait for the save in the background, if there is one; a failure is kept for the next save."""
    for handle in _previous:
        handle._future.exception()
