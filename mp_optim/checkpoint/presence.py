"""Ranks that are gone: named within seconds, by ranks that are there.

When a connection breaks, only the ranks at its ends notice; the others would wait for the group's timeout. So whoever
notices leaves a note in the store through which the ranks found each other, and whoever waits looks there. Each rank
that sees the note signs it. Those that did not after a while are the ones that are missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillWaiting
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_group,
    _get_default_store,
    _get_pg_default_device,
    default_pg_timeout,
)

__all__ = ["Presence", "job_timeout"]

T = TypeVar("T")
_PATIENCE = 5.0
"""Seconds within which every rank that is there has seen a note and signed it."""


def job_timeout() -> timedelta:
    """How long a collective of this job may take: what ``init_process_group`` was given."""
    group = _get_default_group()
    options = getattr(group._get_backend(_get_pg_default_device(group)), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout


class Presence:
    """The ranks of a group, as far as a rank of it can tell. One for a group for as long as it lives.

    Args:
        ranks: their global numbers.
        name: the same on all ranks, and no other group's.
        in_threads: whether a collective may wait in a thread of its own, while this one looks for notes.
    """

    def __init__(self, ranks: list[int], name: str, in_threads: bool) -> None:
        store = _get_default_store()
        self._store = store.clone() if hasattr(store, "clone") else store  # waiting for a key blocks others' questions
        self._ranks, self._name, self._in_threads = ranks, name, in_threads
        self._interval = 0.25 + len(ranks) / 1000
        self._failures = 0

    def call(self, what: str, communicate: Callable[[], T]) -> T:
        """Communicate.

        Raises:
            RuntimeError: it failed here or elsewhere, naming the ranks that are missing.
        """
        try:
            return self._waited(communicate) if self._in_threads else communicate()
        except StillWaiting:
            raise RuntimeError(f"{what} failed: {self._who_is_missing()}") from None
        except RuntimeError as error:
            first = (str(error).splitlines() or [""])[0][:200]
            raise RuntimeError(f"{what} failed: {self._who_is_missing()} ({first})") from error

    def _waited(self, communicate: Callable[[], T]) -> T:
        result: Future[T] = Future()
        threading.Thread(target=_settle, args=(result, communicate), daemon=True).start()
        try:
            while True:
                try:
                    return result.result(self._interval)
                except StillWaiting:
                    if result.done() or self._noted():
                        raise
        except (KeyboardInterrupt, SystemExit):
            self._note()  # others need not wait for this rank
            raise

    @contextmanager
    def signing(self) -> Iterator[None]:
        """While this rank works for itself, it still signs the note of another."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(4 * self._interval):
                if self._noted():
                    self._sign()
                    return

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    # -- notes in the store ---------------------------------------------------------------------------------------

    def _key(self, what: str) -> str:
        return f"mp_optim/checkpoint/{self._name}/{self._failures}/{what}"

    def _noted(self) -> bool:
        try:
            return bool(self._store.check([self._key("failed")]))
        except RuntimeError:
            return True  # the store is gone

    def _note(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and so is whoever could read it
            self._store.set(self._key("failed"), "")

    def _sign(self) -> None:
        with suppress(RuntimeError):
            self._store.set(self._key(str(dist.get_rank())), "")

    def _who_is_missing(self) -> str:
        try:
            self._note()
            self._sign()
            deadline = time.monotonic() + _PATIENCE + 4 * self._interval
            missing = self._ranks
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._store.check([self._key(str(rank))])]
                time.sleep(0.05 if missing else 0.0)
        except RuntimeError:
            return "the store is gone too, so rank 0, if it keeps it, has ended"
        finally:
            self._failures += 1
        if not missing:
            return f"all of ranks {self._ranks} noticed"
        word = "rank" if len(missing) == 1 else "ranks"
        return (f"{word} {', '.join(map(str, missing))} of {self._ranks} did not take part (ended, stuck or doing "
                "something else)")


def _settle(result: Future[T], work: Callable[[], T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:  # whoever waits for it raises it
        result.set_exception(error)
