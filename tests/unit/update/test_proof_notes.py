"""Of a host's processes one proves a backend; the others wait, and take its word."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mp_optim.update.backends import self_test
from mp_optim.update.backends.reference import Backend, ReferenceBackend
from mp_optim.update.backends.self_test import SelfTest, prove_once_a_host

HOST = torch.device("cpu")
EXACT = SelfTest("noted", "cpu", True, True, 0.0, 0.0, "same bits as reference")


class Noted(ReferenceBackend):
    """A backend that says where its proof is noted."""

    name = "noted"

    def __init__(self, note: Path) -> None:
        self._note = note

    def proof_note(self, device: torch.device) -> Path | None:
        return self._note


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Proofs in order; each takes a while."""
    made: list[str] = []

    def whole(backend: Backend, device: torch.device) -> SelfTest:
        made.append("whole")
        time.sleep(0.2)
        return EXACT

    def by_a_step(backend: Backend, device: torch.device) -> SelfTest:
        made.append("step")
        return EXACT

    monkeypatch.setattr(self_test, "prove", whole)
    monkeypatch.setattr(self_test, "prove_by_a_step", by_a_step)
    return made


def test_what_was_proven_is_not_proven_again(
    proofs: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Noted(tmp_path / "notes" / "a.proof")
    for _ in range(2):
        assert prove_once_a_host(backend, HOST) is EXACT
    assert proofs == ["whole", "step"]
    assert "proves noted on cpu, once for this host" in caplog.text
    prove_once_a_host(backend, HOST, whole=True)  # as `mp-optim doctor` does
    prove_once_a_host(Noted(tmp_path / "notes" / "b.proof"), HOST)  # another driver
    assert proofs == ["whole", "step", "whole", "whole"]


def test_many_at_once_prove_once(
    proofs: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Noted(tmp_path / "a.proof")
    threads = [threading.Thread(target=prove_once_a_host, args=(backend, HOST)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(proofs) == ["step", "step", "step", "whole"] and proofs[0] == "whole"
    assert "waiting for another process" in caplog.text


def test_only_exact_bits_are_noted_and_without_a_folder_each_proves(
    proofs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert prove_once_a_host(Noted(tmp_path / "file" / "a.proof"), HOST) is EXACT
    assert proofs == ["whole", "whole"]
    apart = replace(EXACT, exact=False)
    monkeypatch.setattr(self_test, "prove", lambda backend, device: apart)
    note = tmp_path / "a.proof"
    note.touch()
    assert prove_once_a_host(Noted(note), HOST, whole=True) is apart and not note.exists()
