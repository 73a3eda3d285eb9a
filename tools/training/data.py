"""Bytes to train on, without a download: the batch of a step is a pure function of the seed and the
step."""

from __future__ import annotations

import functools
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.config import DataConfig

_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
}


@dataclass(frozen=True)
class Corpus:
    """Two 1-D uint8 tensors; no file is in both."""

    train: Tensor
    eval: Tensor


def load_corpus(config: DataConfig) -> Corpus:
    return _load(config.source, int(config.max_megabytes * 1e6), config.eval_every_nth_file)


@functools.lru_cache(maxsize=4)
def _load(source: str, limit: int, nth: int) -> Corpus:
    documents = _stdlib_documents(limit) if source == "stdlib" else _synthetic_documents(limit)
    held_out = [text for i, text in enumerate(documents) if i % nth == nth - 1]
    trained = [text for i, text in enumerate(documents) if i % nth != nth - 1]
    return Corpus(_to_tensor(trained), _to_tensor(held_out or trained[-1:]))


def _to_tensor(documents: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(documents)), dtype=torch.uint8)


def _stdlib_documents(limit: int) -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(p.relative_to(root).parts)
    )
    topics = root / "pydoc_data" / "topics.py"
    documents, size = [], 0
    for path in [topics, *(p for p in paths if p != topics)]:
        text = path.read_bytes()[: limit - size] if path.exists() else b""
        if text:
            documents.append(text)
            size += len(text)
        if size >= limit:
            break
    return documents


def _synthetic_documents(limit: int) -> list[bytes]:
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    documents, size, state = [], 0, 1
    while size < limit:
        lines = []
        for _ in range(64):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            a, b = (state >> 33) % 10, (state >> 45) % 10
            lines.append(f"{words[a]} plus {words[b]} is {a + b};")
        documents.append("\n".join(lines).encode())
        size += len(documents[-1])
    return documents


def batch(
    data: Tensor, *, seed: int, step: int, sequences: int, seq_length: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(data) - seq_length - 1, (sequences, 1), generator=generator)
    window = data[starts + torch.arange(seq_length + 1)].long()
    return window[:, :-1], window[:, 1:]
