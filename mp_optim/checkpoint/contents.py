"""Looking into a checkpoint without a model: its entries, one at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mp_optim.checkpoint.commit import newest
from mp_optim.checkpoint.index import Index
from mp_optim.checkpoint.manifest import Manifest, read_manifest
from mp_optim.checkpoint.reading import plan_reading, read_index


@dataclass(frozen=True)
class Entry:
    """A saved tensor: whole shape, and the number of boxes it was saved in."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: int

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Contents:
    """A complete version that is open for reading."""

    version: Path
    entries: dict[str, Entry]
    manifest: Manifest
    index: Index

    def read(self, name: str) -> Tensor:
        """One whole tensor, on the host.

        Raises:
            ValueError: its bytes are not those that were written.
        """
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        reading = plan_reading({name: tensor}, self.version, self.index)
        reading.check({})
        reading.read({name})
        return tensor


def open_checkpoint(path: str | os.PathLike[str]) -> Contents:
    """Open the newest version under a checkpoint directory, or one version.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: its files are damaged.
    """
    version = newest(Path(path))
    manifest = read_manifest(version)
    index = read_index(version, manifest)
    entries: dict[str, Entry] = {}
    for name, saved in sorted(index.entries.items()):
        entries[name] = Entry(name, saved.dtype, saved.shape, len(saved.boxes))
    return Contents(version, entries, manifest, index)


@dataclass(frozen=True)
class Difference:
    """How an entry differs between two checkpoints.

    Attributes:
        name: of the entry.
        what: "equal" to the bit; "only in a", "only in b", "dtype", "shape"; or "values".
        differing: elements whose bits differ.
        largest: largest absolute difference; nan if a value that is not finite differs.
        ulps: largest difference in units of the last place, for floating dtypes of up to 4 bytes.
    """

    name: str
    what: str
    differing: int = 0
    largest: float = 0.0
    ulps: int | None = None


def compare(a: Contents, b: Contents) -> Iterator[Difference]:
    """The entries of two checkpoints, by name; two tensors in memory at a time."""
    for name in sorted(a.entries.keys() | b.entries.keys()):
        entry, other = a.entries.get(name), b.entries.get(name)
        if entry is None or other is None:
            yield Difference(name, "only in a" if other is None else "only in b")
        elif entry.shape != other.shape or entry.dtype != other.dtype:
            yield Difference(name, "shape" if entry.shape != other.shape else "dtype")
        else:
            yield _difference(name, a.read(name).reshape(-1), b.read(name).reshape(-1))


def _difference(name: str, a: Tensor, b: Tensor) -> Difference:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(
        a.element_size()
    )
    differs = (a != b) if bits is None else (a.view(bits) != b.view(bits))
    if not differs.any():
        return Difference(name, "equal")
    x, y = a[differs], b[differs]
    wide = torch.complex128 if a.is_complex() else torch.float64
    distance = (x.to(wide) - y.to(wide)).abs()
    largest = float("nan") if bool(distance.isnan().any()) else float(distance.max())
    counted = a.is_floating_point() and a.element_size() in (2, 4)
    ulps = int((_ordered(x) - _ordered(y)).abs().max()) if counted else None
    return Difference(name, "values", int(differs.sum()), largest, ulps)


def _ordered(x: Tensor) -> Tensor:
    """Floating values as integers in the same order: neighbours differ by 1, both zeros are 0."""
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32).long()
    low = -(1 << (8 * x.element_size() - 1))
    return torch.where(bits < 0, low - bits, bits)
