"""Verdicts that the processes of a host share by files: one of them proves a backend whole, which
has its kernels compiled; the others wait for it, find what was compiled, and take a step of each
rule."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mp_optim.update.backends.reference import Backend
from mp_optim.update.backends.self_test import SelfTest, prove, prove_by_a_step

_log = logging.getLogger(__name__)


def prove_once_a_host(backend: Backend, device: torch.device, whole: bool = False) -> SelfTest:
    """Prove a backend whole where that is not noted, else by a step of each rule.

    Args:
        whole: prove it whole in any case.
    """
    try:
        note = backend.proof_note(device)
        if note is None:
            return prove(backend, device)
        note.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(note.with_suffix(".lock"), lambda: f"{backend.name} on {device}"):
            if whole or not note.exists():
                return _proven(backend, device, note)
    except (OSError, RuntimeError, AttributeError) as error:
        # no folder that can be written, or none with locks; a driver that does not say what it is
        _log.info("a verdict on %s cannot be shared: %s", backend.name, error)
        return prove(backend, device)
    return prove_by_a_step(backend, device)


def _proven(backend: Backend, device: torch.device, note: Path) -> SelfTest:
    _log.warning(
        "mp_optim proves %s on %s, once for this host: its kernels are compiled, which takes "
        "minutes (noted in %s)",
        backend.name,
        device,
        note.parent,
    )
    began = time.perf_counter()
    verdict = prove(backend, device)
    taken = time.perf_counter() - began
    _log.warning("%s on %s: %s; %.0f s", backend.name, device, verdict.reason, taken)
    with contextlib.suppress(OSError):
        if verdict.exact:
            note.write_text(f"{verdict.reason}\n")
        else:
            note.unlink(missing_ok=True)
    return verdict


@contextlib.contextmanager
def _one_at_a_time(file: Path, what: Callable[[], str]) -> Iterator[None]:
    """Be the only process of this host inside; a process that ends lets go of it."""
    import fcntl  # where Triton is, there is this

    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("waiting for another process of this host, which proves %s", what())
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
