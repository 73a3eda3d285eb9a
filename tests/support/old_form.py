"""Checkpoints as mp_optim wrote them before ``index.json``: torch's own writer, ``.metadata`` a
pickle."""

from __future__ import annotations

import hashlib
import json
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.layouts import whole

DATA = Path(__file__).resolve().parent / "data"

DIGESTS = {
    "one": "54b1e4111e7ef50a2299e743a0be3c4859a278cac6a5212141aee6b98fd729e9",
    "two": "573e74e38bf5283b9b8c6c5abc9acd8ebdacae8b5e62e799f546e909828a76e0",
}
"""Of :func:`digest`, as the version that wrote them loaded them. "one" was saved by one process
(``build("bf16-8bit", 0.5)`` after two steps), "two" by two ranks (``zero("zero1-2", ...)`` of
``layouts.py``, two steps)."""


def unpacked(folder: Path, name: str) -> Path:
    """The version directory of one of them."""
    with tarfile.open(DATA / "old_form.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name / "version-1"


def state_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Everything there is in full precision, whole, by name."""
    state = dict(model.state_dict())
    for slot in optimizer.slots():
        name = optimizer.slot_name(slot)
        state |= {
            f"{name}.{key}": value
            for key, value in optimizer.full_slot_state(slot).items()
        }
    return {name: whole(value, None) for name, value in state.items()}


def digest(state: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(
            name.encode()
            + bytes(state[name].contiguous().reshape(-1).view(torch.uint8).tolist())
        )
    return found.hexdigest()


def replaced(version: Path, name: str, content: bytes) -> None:
    """Give a file another content, and the manifest its size and checksum: what somebody with
    intent would do."""
    (version / name).write_bytes(content)
    manifest = json.loads((version / "manifest.json").read_text())
    manifest["files"][name] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (version / "manifest.json").write_text(json.dumps(manifest))


def metadata_of(version: Path) -> Any:
    return pickle.loads((version / ".metadata").read_bytes())
