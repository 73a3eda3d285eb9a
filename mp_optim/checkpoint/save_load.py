"""Save and load of checkpoints on disk. A checkpoint has each tensor whole, under its FQN, and
becomes visible by one atomic rename.

Files in a checkpoint directory:

- ``<path>/latest``: name of the newest complete version; replaced atomically.
- ``<path>/version-<n>/``: files of tensors; .metadata; index.json; common.json; manifest.json.

After an interrupted save, ``latest`` still names the previous version.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Hashable, Mapping, Set
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, SupportsIndex, overload

import torch
from torch import nn
from torch.distributed import ProcessGroup

from mp_optim.checkpoint.checked_load import CheckedLoad
from mp_optim.checkpoint.commit import begin, newest, publish, staging_of, write_durably
from mp_optim.checkpoint.common import COMMON, read_common
from mp_optim.checkpoint.entries import packed
from mp_optim.checkpoint.file_format import (
    Index,
    file_sum,
    read_index,
    read_manifest,
    verify_files,
    write_manifest,
)
from mp_optim.checkpoint.inventory import Inventory, Models, chunks_of
from mp_optim.checkpoint.writing import Writing, check_replicas, plan_writing
from mp_optim.core.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.core.model_parallel import ModelParallel
from mp_optim.host.calls import in_own_modes
from mp_optim.process_groups.agreement import Ranks

StrPath = str | os.PathLike[str]

_log = logging.getLogger(__name__)


@overload
def save(
    path: StrPath,
    model: Models,
    optimizer: SlotKeyedOptimizer | None,
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
    optimizer: SlotKeyedOptimizer | None,
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
    optimizer: SlotKeyedOptimizer | None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    *,
    full_precision: bool = False,
    keep: int | None = 1,
    asynchronous: bool = False,
    process_group: ProcessGroup | None = None,
    model_parallel: ModelParallel | None = None,
) -> Path | SaveHandle:
    """Save model, optimizer, scheduler and other data of a run. Every rank calls this function.

    Args:
        path: checkpoint directory that all ranks see; created if missing. The present version is
            kept until the new version is complete.
        model: a module, or the list of chunks that the optimizer was built for.
        optimizer: the optimizer; None saves the model alone.
        scheduler: an object with ``state_dict``; None saves no scheduler.
        extra: plain data (numbers, strings, tensors, containers of them), which :func:`load`
            returns. The first rank's data is saved.
        full_precision: True to write optimizer state with fewer bits as FP32.
        keep: number of complete versions to keep, including the new version; None for all.
        asynchronous: True to write in the background, with the bits of this moment. The save leases
            the optimizer's state and parameters on a GPU, and copies the other tensors that this
            rank writes. The call first waits for an earlier background save of the same path, model
            or optimizer, and raises RuntimeError if that save failed; other saves continue.
        process_group: the ranks that save; None for all ranks. With ``asynchronous`` no other code
            may use this group during the save; a save over all ranks has its own group.
        model_parallel: names and partitions of this rank's parameters, if there is no optimizer
            (:meth:`mp_optim.ModelParallel.of`).

    Returns:
        The directory of the version written; with ``asynchronous`` a handle to wait for it.

    Raises:
        TypeError: an argument has the wrong type, such as a state dict for a model.
        ValueError: the version could not be loaded again: two of the optimizer's parameters have
            one name, a parameter of the model has another shape than the optimizer's, or a setting
            is out of range. Or ``extra`` or the scheduler's state holds data that a safe load
            refuses. Or ranks hold different values under one name (64 elements of each parameter
            are compared), or together do not hold every element of a tensor. Or ranks pass
            different arguments, or ``model_parallel`` together with an optimizer. No file was
            replaced.
        RuntimeError: an earlier background save failed, or this save failed on another rank; the
            message names the rank.
    """
    stack = _checked_stack("save", path, model, optimizer)
    concerned = _concerned(Path(path), model, stack, process_group)
    finish_previous(concerned, raise_errors=False)
    ranks = Ranks.of(process_group)
    options = {"full_precision": full_precision, "keep": keep, "asynchronous": asynchronous}
    ranks.check_arguments("save", path=str(Path(path)), **options)
    _check_keep(keep)
    own = Inventory.among(model, stack, model_parallel, ranks)
    settings = None
    if stack is not None:
        settings = ranks.run_on_all("checking tensors for a save", own.settings)
    ranks.run_on_all("an earlier save", partial(finish_previous, concerned))
    common = {
        "optimizer": settings,
        "extra": dict(extra or {}),
        "model": own.plain(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }
    content = packed(common, ranks)
    target = Path(ranks.broadcast_result("preparing a checkpoint", lambda: str(begin(Path(path)))))
    # Leave out a copy of a tied embedding that a rank of another pipeline stage saves. ZeRO may
    # shard the copies differently, and then their shards would not form one tensor.
    members = ranks.members()
    copies = {name for name, owner in own.parallel.copies.items() if owner in members}
    writing: Writing | None = None
    try:
        writing = plan_writing(
            own.entries(full_precision=full_precision, left_out=copies),
            staging_of(target),
            ranks,
            snapshot=asynchronous,
            params=own.param_entries(),
        )
        check_replicas(own.params(), ranks)
    except BaseException:
        if writing is not None:
            writing.give_back()
        if ranks.rank == 0:
            shutil.rmtree(staging_of(target), ignore_errors=True)
        raise
    if not asynchronous:
        return _write(writing, content, target, keep, ranks)
    try:
        busy = {key for handle in list(_handles) if not handle.done() for key in handle.concerned}
        free = next(lane for n in itertools.count() if (lane := f"lane {n}") not in busy)
        lane = ranks.broadcast(free)
        # Rank 0 chose a lane (a process group for saves) in which it has no running save. A save
        # ends on all ranks together. So the lane's last save is over on this rank, too, or ends
        # soon: drop its handle, and raise its error.
        finish_previous({lane})
        work = partial(_write, writing, content, target, keep, ranks.in_lane(lane, process_group))
        handle = SaveHandle(target, work, writing.wait_for_device, {*concerned, lane})
    except BaseException:
        writing.give_back()
        raise
    _handles.append(handle)
    return handle


def _checked_stack(call: str, path: Any, model: Any, optimizer: Any) -> SlotKeyedOptimizer | None:
    """Return the stack of the optimizer that the caller of :func:`save` or :func:`load` passed.

    Raises:
        TypeError: an argument has the wrong type, for example because the caller passed arguments
            in another order.
    """
    call, stack = f"; call {call}(path, model, optimizer)", getattr(optimizer, "stack", optimizer)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path={type(path).__name__}: must be a path{call}")
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            why = ", not its state dict" if isinstance(chunk, Mapping) else ""
            raise TypeError(f"model={type(chunk).__name__}: must be a module{why}{call}")
    if stack is None or isinstance(stack, SlotKeyedOptimizer):
        return stack
    why = ", not its state dict" if isinstance(stack, Mapping) else ""
    if isinstance(stack, torch.optim.Optimizer):
        call = "; save its state with torch.save(optimizer.state_dict(), path)"
    raise TypeError(
        f"optimizer={type(stack).__name__}: must be an optimizer of mp_optim, or None{why}{call}"
    )


def _check_keep(keep: Any) -> None:
    is_whole = isinstance(keep, SupportsIndex) and not isinstance(keep, bool)
    if keep is not None and not (is_whole and int(keep) >= 1):
        raise ValueError(
            f"keep={keep!r}: must be a whole number >= 1, because the new version is kept; pass a "
            "number of versions, or None to keep all"
        )


def _write(writing: Writing, common: bytes, target: Path, keep: int | None, ranks: Ranks) -> Path:
    """Write this rank's files. After all ranks have written, the first rank makes the version
    the newest."""
    staging = staging_of(target)

    def commit() -> None:
        files = writing.finish([file for of_rank in written for file in of_rank])
        write_durably(staging / COMMON, common)
        files[COMMON] = file_sum(staging / COMMON)
        write_manifest(staging, files, ranks.size)
        publish(target, keep)

    try:
        written = ranks.gather(ranks.run_on_all(f"writing {target}", writing.write))
        ranks.run_on_first(f"completing {target}", commit)
    except Exception:
        if ranks.rank == 0:
            # Free the space of the failed version, because the disk may be full.
            shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        writing.give_back()
    return target


def verify(path: StrPath) -> Path:
    """Compare every file of the newest version with its checksum.

    Args:
        path: a checkpoint directory, or one version in it.

    Returns:
        The directory of the version.

    Raises:
        FileNotFoundError: the directory has no complete checkpoint.
        ValueError: files are missing, or have another size or content; the message names them.
    """
    version = newest(Path(path))
    verify_files(version, read_manifest(version).items())
    return version


@in_own_modes
def load(
    path: StrPath,
    model: Models,
    optimizer: SlotKeyedOptimizer | None,
    scheduler: Any = None,
    *,
    convert: bool = False,
    verify: bool = False,
    process_group: ProcessGroup | None = None,
    model_parallel: ModelParallel | None = None,
) -> dict[str, Any]:
    """Load the newest complete version into existing objects. Every rank calls this function.

    The number of ranks, the sharding and the devices may differ from the save.

    Args:
        path: a checkpoint directory, or one version in it.
        model: a module, or the list of chunks that the optimizer was built for.
        optimizer: the optimizer; None loads the model alone, and an optimizer of the model
            continues from the loaded values.
        scheduler: an object with ``load_state_dict``; None loads no scheduler.
        convert: True to round optimizer state and the model's tensors to the dtypes configured
            here, even if bits are lost.
        verify: True to compare the checksums of all files first; each rank reads some of the files.
            False compares only the bytes that this rank reads, in blocks of 1 MiB.
        process_group: the ranks that load; None for all ranks.
        model_parallel: names and partitions of this rank's parameters, if there is no optimizer.

    Returns:
        The ``extra`` of :func:`save`.

    Raises:
        TypeError: an argument has the wrong type, such as a state dict for a model.
        FileNotFoundError: ``path`` has no complete checkpoint.
        ValueError: entries are missing, unexpected or have another shape (the message lists them);
            bits would be lost; files are damaged or hold other objects than data; or ranks pass
            different arguments. Nothing was replaced.
        Exception: the error of a foreign scheduler, a module's ``set_extra_state`` or a load hook.
            Model and optimizer are partly loaded then, and the optimizer raises BrokenOffError
            until a load succeeds.
    """
    stack = _checked_stack("load", path, model, optimizer)
    concerned = _concerned(Path(path), model, stack, process_group)
    finish_previous(concerned, raise_errors=False)
    if stack is not None:
        stack.step_mark.check_lent("checkpoint.load")
    ranks = Ranks.of(process_group)
    ranks.check_arguments("load", path=str(Path(path)), convert=convert, verify=verify)
    own = Inventory.among(model, stack, model_parallel, ranks)
    version = Path(ranks.broadcast_result(f"loading {path}", lambda: str(newest(Path(path)))))
    loading = f"loading {version}"
    if stack is not None:
        ranks.run_on_all(loading, own.check_names)
        # A changed setting of a param group can change which state exists. So copy the settings to
        # every part of the optimizer before the entries are listed.
        ranks.run_on_all(loading, stack.share_settings)
    index, common = ranks.run_on_all(loading, lambda: _open(version, verify, ranks))
    load = CheckedLoad(version, index, common, own, scheduler, ranks, convert)
    ranks.run_on_all(loading, load.check_files)
    ranks.run_on_all(loading, load.check_values)
    try:
        ranks.run_on_all(loading, load.write)
    except BaseException:
        if stack is not None:
            stack.step_mark.touch()
        raise
    extra: dict[str, Any] = common["extra"]
    return extra


def _open(version: Path, verify: bool, ranks: Ranks) -> tuple[Index, dict[str, Any]]:
    files = read_manifest(version)
    index, common = read_index(version, files), read_common(version, files)
    if verify:
        verify_files(version, list(files.items())[ranks.rank :: ranks.size])
    return index, common


# -- in the background ----------------------------------------------------------------------------


class SaveHandle:
    """A save in the background.

    A process waits for its saves before it ends. If the process is killed during the save, the
    previous checkpoint stays the newest.

    Attributes:
        path: directory of the version, which exists once the save is complete.
        concerned: keys of the path, the model, the optimizer and the process group of the save. A
            later save or load with an equal key first waits for this save.
    """

    def __init__(
        self,
        path: Path,
        work: Callable[[], object],
        device_is_free: Callable[[float | None], bool],
        concerned: Set[Hashable],
    ) -> None:
        self.path, self.concerned = path, concerned
        self._work, self._device_is_free = work, device_is_free
        self._future: Future[Path] = Future()
        self._is_raised = False
        self._thread = threading.Thread(target=self._run, name=f"saving {path.name}", daemon=False)
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
            # Break a reference cycle: the error's traceback holds this frame, ``self`` in the frame
            # holds the future, and the future holds the error.
            del self._work, self

    def done(self) -> bool:
        """True if the save is complete or has failed."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            The directory of the version written.

        Raises:
            TimeoutError: the save was not complete in time. The save continues.
            Exception: the error of a failed save. If no call of this method raised the error, the
                next save of the same path, model or optimizer raises RuntimeError with its text.
        """
        try:
            path = self._future.result(timeout)
        except BaseException:
            self._is_raised = self._is_raised or self._future.done()
            raise
        self._thread.join()
        return path

    def wait_for_device(self, timeout: float | None = None) -> None:
        """Wait until the save has copied the GPU tensors that it saves. Call this method before
        your own code writes the model's parameters; steps of this package's optimizers wait
        without this call.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            TimeoutError: the copies were not complete in time. The copies continue.
        """
        if not self._device_is_free(timeout):
            raise TimeoutError(
                f"timeout={timeout!r}: {self.path} is not yet copied from the device; call again "
                "with a longer timeout"
            )


_handles: list[SaveHandle] = []
"""Background saves that still run, and ended saves that no later save has checked for errors."""


def _concerned(
    path: Path, model: Models, stack: SlotKeyedOptimizer | None, group: ProcessGroup | None
) -> set[Hashable]:
    """Return keys of the objects that two background saves must not share: the path, the model's
    chunks, the optimizer, and the caller's process group.

    A version's path has the key of its directory.
    """
    objects: list[object] = [*chunks_of(model), stack, group]
    keys: set[Hashable] = {id(value) for value in objects if value is not None}
    whole = path.absolute()
    return keys | {str(whole.parent if whole.name.startswith("version-") else whole)}


def finish_previous(concerned: Set[Hashable] | None = None, *, raise_errors: bool = True) -> None:
    """Wait for background saves, and raise RuntimeError if a save failed.

    Args:
        concerned: keys from :func:`_concerned`; saves without any of these keys continue. None
            waits for all saves.
        raise_errors: False to leave the error of a failed save to the next call with True.

    Raises:
        RuntimeError: a save failed, and no call has raised its error yet.
    """
    handles = [one for one in _handles if concerned is None or one.concerned & concerned]
    failed: list[tuple[Path, BaseException]] = []
    for handle in handles:
        error = handle._future.exception()
        if not raise_errors:
            continue
        _handles.remove(handle)
        handle._thread.join()
        if error is not None and not handle._is_raised:
            failed.append((handle.path, error))
    if failed:
        texts = "; ".join(f"the background save of {path} failed: {why}" for path, why in failed)
        raise RuntimeError(f"{texts}; save again") from failed[0][1]
