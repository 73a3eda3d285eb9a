"""Run rows, each in a process of its own with a time limit and a log, and keep each result at once.

DIR/NAME/PART/ROW.json is the record of a row, DIR/NAME/PART/ROW.log its output.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # which every torch optimizer imports: once here, not in each row's process

from end_to_end.measure import host_memory_left
from end_to_end.rows import NotInstalledError, Record, Row, UnfinishedError, cause_of
from lab.gpu import facts
from support.accelerator.simulation import KIND, device_at
from support.accelerator.stand_in import simulated_accelerator

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("torchao", "bitsandbytes", "flashoptim", "megatron-core", "deepspeed"),
    *("apex", "transformer-engine"),
)
NOT_INSTALLED = "not installed"


class Results:
    """The records in a folder."""

    def __init__(self, folder: Path, name: str = "training") -> None:
        self.folder = folder.resolve() / name

    def file(self, part: str, row: Row) -> Path:
        """Return the path of a row's record; its log has another suffix."""
        return self.folder / part / (re.sub(r"[^a-zA-Z0-9.]+", "-", row.name).strip("-") + ".json")

    def record(self, part: str, row: Row) -> Record | None:
        """Return a row's record, or None if it was not run with these arguments."""
        file = self.file(part, row)
        found: Record | None = json.loads(file.read_text()) if file.exists() else None
        return found if found and found["arguments"] == dict(row.arguments) else None

    def is_finished(self, part: str, row: Row, retry: bool) -> bool:
        """True if a row need not be run.

        Args:
            retry: True to run rows without a result again. Rows whose package was missing always
                are.
        """
        found = self.record(part, row)
        if found is None or found["cause"].startswith(NOT_INSTALLED):
            return False
        return not (retry and found["columns"] is None)


def run(results: Results, part: str, row: Row, device: str, patience: float = 1.0) -> Record:
    """Run a row in a forked process, keep and return its record.

    Args:
        patience: factor of the row's time limit.

    NOTE: this process must not touch the GPU: a process forked from it could not use it then.
    """
    file, started = results.file(part, row), time.monotonic()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".part").unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(row, device, file))
    process.start()
    assert process.pid is not None
    cause = _limit_reached(process, started, row, patience * row.seconds)
    process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
    process.join()
    part_of_record = file.with_suffix(".part")
    if part_of_record.exists() and not cause:
        record: Record = json.loads(part_of_record.read_text())
        part_of_record.unlink()
    else:
        code = process.exitcode or 0
        died = f"killed by signal {-code}" if code < 0 else f"ended with {code}"
        record = {"columns": None, "cause": cause or f"{died}: see {file.stem}.log", "facts": {}}
    record = {**asdict(row), "arguments": dict(row.arguments), **record}
    record["took"] = round(time.monotonic() - started, 1)
    file.write_text(json.dumps(record, indent=1) + "\n")
    return record


def _limit_reached(process: BaseProcess, started: float, row: Row, seconds: float) -> str:
    """Wait for the end of a row's process, or for the first limit that it reaches: of time, or of
    the host's memory, for which the kernel would kill some process."""
    while process.is_alive():
        process.join(0.05)
        if time.monotonic() - started > seconds:
            return f"took more than {seconds:.0f} s"
        if (left := host_memory_left()) < row.host_left:
            return f"out of memory: {left:.1f} GiB of the host are left, {row.host_left:g} must be"
    return ""


def _child(row: Row, device: str, file: Path) -> None:
    os.setsid()
    sys.path[:] = map(os.path.abspath, sys.path)
    os.chdir(file.parent)
    log = os.open(file.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with suppress(OSError):  # if host memory runs out, the kernel kills this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    with _device(device) as place:
        columns, cause = _called(row, place)
        found = {"columns": columns, "cause": cause, "facts": _facts(device)}
    print(json.dumps(found))
    sys.stdout.flush()
    file.with_suffix(".part").write_text(json.dumps(found))
    os._exit(0)  # libraries that are at odds with fork, or with their own end, cannot hang it


@contextmanager
def _device(name: str) -> Iterator[torch.device]:
    if name != "simulated":
        yield torch.device(name)
        return
    module = SimpleNamespace(get_amp_supported_dtype=lambda: [torch.bfloat16])
    with (  # checkpoint() reads the module
        mock.patch.object(torch, KIND, module, create=True),
        simulated_accelerator() as simulation,
    ):
        yield device_at(1)
        simulation.synchronize()
        if simulation.reports:
            raise RuntimeError("; ".join(simulation.reports))


def _called(row: Row, device: torch.device) -> tuple[dict[str, Any] | None, str]:
    module, _, function = row.call.partition(":")
    try:
        module = module if "." in module else f"end_to_end.{module}"
        call = getattr(importlib.import_module(module), function)
        return call(device=device, **row.arguments), ""
    except NotInstalledError as missing:
        return None, f"{NOT_INSTALLED}: {missing}"
    except UnfinishedError as error:
        return error.columns, str(error)
    except Exception as error:
        traceback.print_exc()
        return None, cause_of(error)


def machine(device: str) -> dict[str, Any]:
    """Return card, commit and versions. The work is done in a process of its own, so that this
    process does not touch the GPU.

    Raises:
        RuntimeError: torch finds no such device.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_facts, device).result()


def _facts(device: str) -> dict[str, Any]:
    found = facts.machine(torch.device("cpu" if device == "simulated" else device))
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {key: value for key, value in found.items() if value} | {"commit": commit()}


def commit() -> str:
    """Return the checkout's commit, from ``MP_OPTIM_COMMIT`` where there is no repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("MP_OPTIM_COMMIT", "unknown")
