"""Checkpoints on disk: natural-shape entries under FQNs, committed by one atomic rename.

Layout of a checkpoint directory::

    <path>/latest          name of the newest complete version; replaced atomically
    <path>/version-<n>/    torch.distributed.checkpoint files; index.json; common.pt; manifest.json

An interrupted save leaves ``latest`` where it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, SupportsIndex, overload

import torch
from torch.distributed import ProcessGroup

from mp_optim.checkpoint import background
from mp_optim.checkpoint.background import SaveHandle
from mp_optim.checkpoint.checked_load import CheckedLoad, Receiver
from mp_optim.checkpoint.commit import (
    begin,
    complete_versions,
    newest,
    publish,
    staging_of,
)
from mp_optim.checkpoint.common import COMMON, packed, read_common
from mp_optim.checkpoint.durable import write_durably
from mp_optim.checkpoint.entries import (
    Models,
    entries_of,
    param_entries,
    params_of,
    plain_of,
)
from mp_optim.checkpoint.index import Index
from mp_optim.checkpoint.manifest import (
    Manifest,
    file_sum,
    read_manifest,
    verify_files,
    write_manifest,
)
from mp_optim.checkpoint.ranks import Ranks
from mp_optim.checkpoint.reading import read_index
from mp_optim.checkpoint.renaming import common_under, index_under, renamed_entries
from mp_optim.checkpoint.replicas import check_replicas
from mp_optim.checkpoint.shared_model import (
    parallel_of,
    saved_elsewhere,
    settings_of,
)
from mp_optim.checkpoint.writing import Writing, plan_writing
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.slots.keyed_optimizer import OverStack, SlotKeyedOptimizer, stack_of
from mp_optim.slots.model_parallel import ModelParallel

StrPath = str | os.PathLike[str]


@overload
def save(
    path: StrPath,
    model: Models,
    optimizer: SlotKeyedOptimizer | OverStack | None,
    scheduler: Any = ...,
    extra: Mapping[str, Any] | None = ...,
    *,
    full_precision: bool = ...,
    keep: int | None = ...,
    asynchronous: Literal[False] = ...,
    process_group: ProcessGroup | None = ...,
    model_parallel: ModelParallel | None = ...,
) -> Path: ...
@overload
def save(
    path: StrPath,
    model: Models,
    optimizer: SlotKeyedOptimizer | OverStack | None,
    scheduler: Any = ...,
    extra: Mapping[str, Any] | None = ...,
    *,
    full_precision: bool = ...,
    keep: int | None = ...,
    asynchronous: Literal[True],
    process_group: ProcessGroup | None = ...,
    model_parallel: ModelParallel | None = ...,
) -> SaveHandle: ...
@in_own_modes
def save(
    path: StrPath,
    model: Models,
    optimizer: SlotKeyedOptimizer | OverStack | None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    *,
    full_precision: bool = False,
    keep: int | None = 1,
    asynchronous: bool = False,
    process_group: ProcessGroup | None = None,
    model_parallel: ModelParallel | None = None,
) -> Path | SaveHandle:
    """Save model, optimizer and whatever else is needed to go on. Every rank calls it.

    Args:
        path: checkpoint directory that all ranks see; created if missing. The version it held stays
            until the new one is complete.
        model: a module, or the list of chunks the optimizer was built for.
        optimizer: None saves the model alone.
        scheduler: anything with ``state_dict``.
        extra: plain data (numbers, strings, tensors, containers of them) returned by :func:`load`;
            the first rank's.
        full_precision: write optimizer state that is kept in fewer bits as FP32.
        keep: complete versions to keep, the new one among them; None for all.
        asynchronous: borrow the optimizer's state, and the model's parameters where they lie on a
            GPU, copy the rest that this rank writes, return, and write in the background the bits
            of this moment. A save that is still going on is waited for first, and raises here if it
            failed.
        process_group: the ranks that save; all by default. With ``asynchronous`` it has to be one
            that nothing else uses meanwhile (all by default is).
        model_parallel: what this rank has of the model, where there is no optimizer that knows
            (:meth:`mp_optim.ModelParallel.of`).

    Returns:
        The directory of the version written; or, if ``asynchronous``, a handle to wait for it.

    Raises:
        ValueError: ``extra`` or the scheduler's state holds what a safe load would refuse, ranks
            hold different things under one name (64 elements of each parameter are compared), or
            they call it with another path or other settings; nothing was replaced. Or
            ``model_parallel`` beside an optimizer.
        RuntimeError: an earlier save in the background failed, or this one failed on another rank,
            naming it.
    """
    background.wait_for_previous()  # it talks over the same group
    stack: SlotKeyedOptimizer | None = stack_of(optimizer)
    ranks = Ranks.of(process_group)
    ranks.alike(
        "checkpoint.save",
        {
            "the call": "save",
            "path": str(Path(path)),
            "full_precision": full_precision,
            "keep": keep,
            "asynchronous": asynchronous,
        },
    )
    if keep is not None and not _is_count(keep):
        raise ValueError(
            f"keep={keep!r}: must be a whole number of versions, with at least the one that is "
            "saved; None keeps all"
        )
    parallel = parallel_of(stack, model_parallel, ranks)
    ranks.agree("an earlier save", background.finish_previous)
    common = {
        "optimizer": stack and settings_of(stack, parallel),
        "extra": dict(extra or {}),
        "model": plain_of(model, parallel),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }
    content = packed(common, ranks)
    target = Path(ranks.first("preparing a checkpoint", lambda: str(begin(Path(path)))))
    writing = plan_writing(
        entries_of(
            model,
            stack,
            parallel,
            full_precision=full_precision,
            left_out=saved_elsewhere(parallel, ranks),
        ),
        staging_of(target),
        ranks,
        snapshot=asynchronous,
        params=param_entries(model, parallel),
    )

    def work() -> Path:
        return _write(writing, content, target, keep, ranks)

    try:
        check_replicas(params_of(model, parallel), ranks)
        if not asynchronous:
            return work()
        return background.start(target, work, writing.wait_for_device)
    except BaseException:
        writing.give_back()
        raise


def _is_count(value: Any) -> bool:
    is_whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    return is_whole and int(value) >= 1


def _write(
    writing: Writing, common: bytes, target: Path, keep: int | None, ranks: Ranks
) -> Path:
    """Write this rank's files; the first rank makes the version the newest when all have."""
    staging = staging_of(target)

    def commit() -> None:
        files = writing.finish([part for of_rank in parts for part in of_rank])
        write_durably(staging / COMMON, common)
        files[COMMON] = file_sum(staging / COMMON)
        write_manifest(
            staging,
            Manifest(files, {"world_size": ranks.size, "torch": torch.__version__}),
        )
        publish(target, keep)

    try:
        parts = ranks.agree(f"writing {target}", writing.write)
        ranks.on_first(f"completing {target}", commit)
    except Exception:
        if ranks.is_first:
            shutil.rmtree(staging, ignore_errors=True)  # the disk may be full
        raise
    finally:
        writing.give_back()
    return target


def versions(path: StrPath) -> list[Path]:
    """The complete versions under a checkpoint directory, oldest first; each can be loaded by its
    own path."""
    return complete_versions(Path(path))


def verify(path: StrPath) -> Path:
    """Compare every file of the newest version with the checksums taken while it was written.

    Args:
        path: a checkpoint directory, or one version in it.

    Returns:
        The directory of the version.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: files are missing, of another size or of other content, naming them.
    """
    version = newest(Path(path))
    verify_files(version, read_manifest(version).files.items())
    return version


@in_own_modes
def load(
    path: StrPath,
    model: Models,
    optimizer: SlotKeyedOptimizer | OverStack | None,
    scheduler: Any = None,
    *,
    convert: bool = False,
    verify: bool = False,
    process_group: ProcessGroup | None = None,
    model_parallel: ModelParallel | None = None,
) -> dict[str, Any]:
    """Load the newest complete version into objects that exist, whatever their placement. Every
    rank calls it.

    Args:
        path: a checkpoint directory, or one version in it.
        optimizer: None loads the model alone; call ``optimizer.reload_model_params()`` if it has an
            optimizer.
        convert: round optimizer state to the dtypes configured here, and the model's tensors to
            theirs, also where that loses bits.
        verify: compare the checksums of all files first; each rank reads a share of them. Without
            it, what this rank reads is compared, in blocks of 1 MiB.
        process_group: the ranks that load; all by default.
        model_parallel: as for :func:`save`.

    Returns:
        What was passed to :func:`save` as ``extra``.

    Raises:
        FileNotFoundError: there is no complete checkpoint under ``path``.
        ValueError: entries are missing, unexpected or mis-shaped, listing their names; bits would
            be lost; files are damaged or hold something else than data; or ranks call it with
            another path or other settings. Nothing was replaced.
        Exception: what the scheduler, or hooks for loading, raised; everything was put back.
    """
    background.wait_for_previous()
    stack: SlotKeyedOptimizer | None = stack_of(optimizer)
    if stack is not None:
        stack.step_mark.check_lent("checkpoint.load")
    ranks = Ranks.of(process_group)
    ranks.alike(
        "checkpoint.load",
        {
            "the call": "load",
            "path": str(Path(path)),
            "convert": convert,
            "verify": verify,
        },
    )
    parallel = parallel_of(stack, model_parallel, ranks)
    version = Path(ranks.first(f"loading {path}", lambda: str(newest(Path(path)))))
    loading = f"loading {version}"
    index, common = ranks.each(loading, lambda: _open(version, verify, ranks))
    own = entries_of(model, stack, parallel)
    renamed = renamed_entries(index.entries, own)
    index, common = index_under(renamed, index), common_under(renamed, common)
    receiver = Receiver(model, stack, scheduler, parallel, own)
    load = CheckedLoad(version, index, common, receiver, ranks, convert=convert)
    ranks.agree(loading, load.check_files)
    ranks.agree(loading, load.check_values)
    try:
        ranks.agree(loading, load.rehearse)
        ranks.agree(loading, load.write)
    except BaseException:
        load.take_back()
        raise
    extra: dict[str, Any] = common["extra"]
    return extra


def _open(version: Path, verify: bool, ranks: Ranks) -> tuple[Index, dict[str, Any]]:
    manifest = read_manifest(version)
    index, common = read_index(version, manifest), read_common(version, manifest)
    # An older version of mp_optim kept no other checksums.
    if verify or index.sums is None:
        verify_files(version, list(manifest.files.items())[ranks.rank :: ranks.size])
    return index, common
