"""Writing tensors with ``torch.distributed.checkpoint``'s planner and file format, in two parts.

Planning decides which rank writes what; it is where the ranks talk. Writing then needs no other rank, so it can happen
in the background, from a snapshot of just what this rank writes.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mp_optim.checkpoint.durable import sync_file
from mp_optim.checkpoint.manifest import FileSum, file_sum
from mp_optim.checkpoint.ranks import Ranks

__all__ = ["METADATA", "Part", "Writing", "plan_writing"]

METADATA = ".metadata"
"""The file in which torch.distributed.checkpoint keeps what is where."""


class _Hashed(io.BufferedIOBase):
    """A file that is summed up while it is written, so that what was meant is on record, not what arrived."""

    def __init__(self, file: Any) -> None:
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        written: int = self._file.write(data)
        return written

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        self.flush()  # whoever asks is about to sync
        number: int = self._file.fileno()
        return number

    def sum(self) -> FileSum:
        return FileSum(self._size, self._digest.hexdigest())


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            hashed = _Hashed(stream)
            yield hashed
            self.sums[Path(path).name] = hashed.sum()


class _SnapshotPlanner(DefaultSavePlanner):
    """A planner that can keep copies of what it has to write."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[MetadataIndex, Tensor] | None = None

    def take_snapshot(self) -> None:
        """Copy to the host what the finished plan writes; the tensors may change from here on."""
        self._copies = {item.index: self.lookup_object(item.index).detach().to("cpu", copy=True)
                        for item in self.plan.items}
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if self._copies is not None:
            return self._copies.pop(write_item.index)
        data: Tensor | io.BytesIO = super().resolve_data(write_item)
        return data


@dataclass(frozen=True)
class Part:
    """What one rank wrote."""

    results: list[WriteResult]
    files: Mapping[str, FileSum]


@dataclass
class Writing:
    """One rank's share of a save that is planned."""

    writer: FileSystemWriter
    planner: _SnapshotPlanner
    plan: SavePlan
    metadata: Metadata | None = field(repr=False)

    def write(self) -> Part:
        """Write this rank's files, synced. Talks to nobody."""
        results = self.writer.write_data(self.plan, self.planner).wait()
        return Part(results, dict(self.writer.fs.sums))  # type: ignore[attr-defined]

    def finish(self, parts: list[Part]) -> dict[str, FileSum]:
        """On the first rank, after all have written: write what is where.

        Returns:
            The files of all ranks.
        """
        assert self.metadata is not None
        self.writer.finish(self.metadata, [part.results for part in parts])
        path = Path(self.writer.path) / METADATA
        sync_file(path)
        return {**{name: entry for part in parts for name, entry in part.files.items()}, METADATA: file_sum(path)}


def plan_writing(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks, *, snapshot: bool) -> Writing:
    """Decide what each rank writes; equal entries of several ranks are written once.

    Args:
        tensors: this rank's entries; the same names may be on several ranks.
        folder: an empty directory that all ranks see.
        snapshot: copy what this rank writes.

    Raises:
        ValueError: ranks disagree about an entry, naming it.
    """
    planner, writer = _SnapshotPlanner(), FileSystemWriter(folder)
    writer.fs = _HashingFileSystem()

    def local_plan() -> SavePlan:
        planner.set_up_planner(dict(tensors), writer.storage_meta(), ranks.is_first)
        writer.set_up_storage_writer(ranks.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    local_plans = ranks.agree("planning a checkpoint", local_plan)

    def global_plan() -> tuple[list[SavePlan], Metadata]:
        _check_agreement(local_plans)
        plans, metadata = planner.create_global_plan(local_plans)
        return writer.prepare_global_plan(plans), metadata

    plans, metadata = ranks.on_first("planning a checkpoint", global_plan) or ([], None)
    writing = Writing(writer, planner, planner.finish_plan(ranks.scatter(plans)), metadata)
    if snapshot:
        ranks.agree("copying what is saved", planner.take_snapshot)
    return writing


def _check_agreement(plans: list[SavePlan]) -> None:
    """Entries of the same name must be the same thing everywhere: a copy that is not written must not differ."""
    seen: dict[str, tuple[tuple[torch.Size, torch.dtype, bool], int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            what = item.tensor_data.size, item.tensor_data.properties.dtype, item.type == WriteItemType.SHARD
            other, first = seen.setdefault(item.index.fqn, (what, rank))
            if other != what:
                raise ValueError(f"{item.index.fqn} is {_said(other)} on rank {first} and {_said(what)} on rank "
                                 f"{rank}; different things need different names")


def _said(what: tuple[torch.Size, torch.dtype, bool]) -> str:
    return f"{what[1]} {tuple(what[0])}, {'sharded' if what[2] else 'whole'}"
