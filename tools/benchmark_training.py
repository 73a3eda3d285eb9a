#!/usr/bin/env python
"""Train one job with every optimizer: tokens a second, peak memory, and the loss.

python tools/benchmark_training.py --output runs --minutes 9    # resumes when repeated
python tools/benchmark_training.py --miniature --output try     # every row on a CPU

Each row is a process of its own with a time limit. OUTPUT/training/PART has its record and its log,
OUTPUT/training.md the table of all records. A row with a record is not run again, except if the
package of its optimizer was not installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from measuring.kernels import require_kernels
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from end_to_end.contenders import CONTENDERS, NotInstalledError, Setting
from end_to_end.model import build
from lab.gpu import facts
from training.config import DataConfig
from training.data import batch, load_corpus

ROOT = Path(__file__).resolve().parents[1]
GIB = float(1 << 30)
PARTS = {
    "D": "Shares on the host: Qwen3-0.6B shape, 44K tokens a step",
    "A": "One job, all optimizers: Qwen3-4B shape, blocks checkpointed",
}
COLUMNS = {
    "tokens_per_s": "tokens/s",
    "iteration_ms": "ms a step",
    "allocated": "peak GiB allocated",
    "reserved": "peak GiB reserved",
    "host": "host GiB",
    "rss": "host GiB resident",
    "pinned": "host GiB page-locked by torch",
    "clips": "clips",
    "loss_first": "first loss",
    "loss": "last loss",
}
PAGE = ROOT / "tools" / "end_to_end" / "page.md"
PREDICTIONS: dict[str, Any] = json.loads(PAGE.with_name("predictions.json").read_text())
"""Columns by part and row, predicted before any GPU had run a row. Never change a prediction:
``page.md`` says how it was made, and which values refute it."""
NOT_INSTALLED = "not installed"


@dataclass
class Options:
    """Parts to run, and the folder of their records."""

    part: tuple[str, ...] = ()
    """`D` (shares on the host) or `A` (all optimizers), in this order; both if empty."""
    output: Path = Path("benchmark")
    """Folder of the records."""
    miniature: bool = False
    """Try every row with 2 M parameters and 20 steps on a CPU, and measure nothing."""
    only: str = ""
    """Rows whose name contains this text."""
    retry: bool = False
    """Also run rows again that ended without a result."""
    patience: float = 1.0
    """Factor of every row's time limit, for optimizers that compile at their first use."""
    minutes: float = 0.0
    """Begin no row that may end later than this; 0 for no limit."""
    report: bool = False
    """Run nothing: write the table of the existing records."""


@dataclass(frozen=True)
class Row:
    """One optimizer and one size of the job.

    Attributes:
        contender: key of ``CONTENDERS``.
        sequences, sequence, micro: sequences of a step, tokens of each, sequences of a micro-batch.
        warmup, steps: steps that are not timed, and timed steps.
        seconds: limit of the row's process.
    """

    part: str
    name: str
    contender: str
    shape: str
    sequences: int
    sequence: int
    micro: int
    warmup: int
    steps: int
    seconds: float


def rows(miniature: bool) -> Iterator[Row]:
    """Yield all rows, most important first."""
    # 44K tokens make a step of about 0.75 s, as in NVIDIA's test of HybridDeviceOptimizer.
    shares, short = ("Qwen3-0.6B", 11, 4096, 11, 3, 9), ("Qwen3-4B", 2, 4096, 2, 2, 3)
    long = ("Qwen3-4B", 16, 4096, 2, 1, 2)
    if miniature:
        shares = short = ("tiny", 2, 32, 2, 1, 19)
        long = ("tiny", 2, 32, 1, 1, 19)
    for name in PREDICTIONS["D"]:
        kind = {
            "ours, 0": "ours, GPU, FP32",
            "ours, 0.5, overlap": "ours, host 0.5, overlap",
            "ours, 1, overlap": "ours, host, overlap",
            "ours, 1, speculative": "ours, host, speculative",
        }
        hybrid = f"Megatron HybridDeviceOptimizer, {float(name.split(', ')[1])}"
        yield Row("D", name, kind.get(name, hybrid), *shares, 90)
    for name in PREDICTIONS["A"]:
        contender, size = name.rsplit(", ", 1)
        yield Row("A", name, contender, *(short if size == "8K tokens" else long), 120)


def train(row: Row, device: torch.device) -> dict[str, Any]:
    """Train from random weights on real bytes, and return speed, peak memory (GiB) and losses."""
    contender, pieces = CONTENDERS[row.contender], row.sequences // row.micro
    # FP32 parameters start at the values of bf16 ones, so that all rows have equal weights.
    model = build(row.shape, device, torch.bfloat16).to(contender.dtype)
    setting = Setting(1.0 if contender.clips else None, pieces, row.micro, device)
    loop = contender.build(model, setting)
    corpus = load_corpus(DataConfig(source="stdlib", max_megabytes=4)).train
    table = torch.arange(256) * 593 % model.shape.vocab
    times, losses = list[float](), list[float]()
    for step in range(row.warmup + row.steps):
        start = time.perf_counter()
        both = batch(corpus, seed=0, step=step, sequences=row.sequences, seq_length=row.sequence)
        ids, labels = (table[each].to(device).split(row.micro) for each in both)
        total = torch.zeros((), device=device)
        for number, piece in enumerate(zip(ids, labels, strict=True)):
            mixed = torch.autocast(device.type, torch.bfloat16)
            with mixed if contender.autocast else nullcontext():
                loss = loop.forward(*piece)
            total += loss.detach()
            loop.backward(loss, is_last=number == pieces - 1)
        loop.step()
        losses.append(_read(total / pieces))
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[row.warmup :])
    return {
        "tokens_per_s": row.sequences * row.sequence / seconds,
        "iteration_ms": seconds * 1e3,
        "loss_first": losses[0],
        "loss": losses[-1],
        "clips": setting.clip is not None,
        **_memory(device),
    }


def _read(value: Tensor) -> float:
    """Return a value of the device after all its queued work, the step included, has ended."""
    if value.is_cuda:
        torch.cuda.synchronize()
    return float(value)


def _memory(device: torch.device) -> dict[str, float]:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = {"rss": sum(int(x.split()[1]) << 10 for x in lines if x.startswith("VmHWM:")) / GIB}
    if device.type == "cuda":
        found["pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / GIB
        found["allocated"] = torch.cuda.max_memory_allocated(device) / GIB
        found["reserved"] = torch.cuda.max_memory_reserved(device) / GIB
    return found


# -- records --------------------------------------------------------------------------------------


def record_file(folder: Path, row: Row) -> Path:
    name = re.sub(r"[^a-zA-Z0-9.]+", "-", row.name).strip("-")
    return folder.resolve() / "training" / row.part / f"{name}.json"


def record_of(folder: Path, row: Row) -> dict[str, Any] | None:
    """Return a row's record: its arguments, ``columns`` or the ``cause`` without, and ``facts``."""
    file = record_file(folder, row)
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found if found and found["row"] == asdict(row) else None


def run(folder: Path, row: Row, device: torch.device, patience: float = 1.0) -> dict[str, Any]:
    """Run a row in a forked process, and keep and return its record.

    NOTE: this process must not touch the GPU: a process forked from it could not use it then.
    """
    file, limit = record_file(folder, row), patience * row.seconds
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(row, device, file))
    process.start()
    process.join(limit)
    if process.is_alive() or not file.exists():
        died = f"ended with {process.exitcode}: see {file.stem}.log"
        cause = f"took more than {limit:.0f} s" if process.is_alive() else died
        process.kill()
        process.join()
        file.write_text(_record(row, None, cause))
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def _record(row: Row, columns: dict[str, Any] | None, cause: str, **facts: Any) -> str:
    found = {"row": asdict(row), "columns": columns, "cause": cause, "facts": facts}
    return json.dumps(found, indent=1) + "\n"


def _child(row: Row, device: torch.device, file: Path) -> None:
    log = os.open(file.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with suppress(OSError):  # if host memory runs out, the kernel kills this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    columns, cause = None, ""
    try:
        columns = train(row, device)
    except NotInstalledError as missing:
        cause = f"{NOT_INSTALLED}: {missing}"
    except Exception as error:
        traceback.print_exc()
        said = (str(error).strip().splitlines() or [""])[0][:300]
        cause = f"{type(error).__name__}: {said}"
    text = _record(row, columns, cause, **_facts(device))
    whole = file.with_suffix(".whole")
    whole.write_text(text)
    whole.rename(file)
    sys.stdout.flush()
    os._exit(0)  # libraries that fail at their own end cannot hang this process


def _facts(device: torch.device) -> dict[str, Any]:
    found = facts.machine(device)
    for package in ("torchao", "bitsandbytes", "flashoptim", "megatron-core", "deepspeed"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    commit = os.environ.get("MP_OPTIM_COMMIT")
    with suppress(OSError, subprocess.SubprocessError):
        commit = commit or subprocess.check_output(command, text=True, stderr=-3).strip()
    return {key: value for key, value in found.items() if value} | {"commit": commit or "unknown"}


# -- report ---------------------------------------------------------------------------------------


def markdown(folder: Path, miniature: bool = False) -> str:
    """Return the page of all rows: predicted and measured columns, and refuted predictions."""
    lines = [PAGE.read_text()]
    for part, title in PARTS.items():
        found = {row: record_of(folder, row) for row in rows(miniature) if row.part == part}
        measured = [key for key in COLUMNS if any(key in _columns(x) for x in found.values())]
        guesses = [] if miniature else ["tokens_per_s", "allocated", "host"]
        heads = ["row", *(f"{COLUMNS[key]}, predicted" for key in guesses)]
        heads += [COLUMNS[key] for key in measured]
        lines += [f"## Part {part}. {title}", "", "| " + " | ".join([*heads, ""]) + " |"]
        lines += ["|---" * (len(heads) + 1) + "|"]
        for row, record in found.items():
            predicted, columns = PREDICTIONS[part][row.name], _columns(record)
            source = CONTENDERS[row.contender].source
            cells = [f"[{row.name}]({source})" if source else row.name]
            cells += [_cell(predicted[key]) for key in guesses]
            cells += [_cell(columns.get(key)) for key in measured]
            refuted = [COLUMNS[key] for key in guesses if _refutes(key, predicted[key], columns)]
            cause = record["cause"] if record else "not run"
            cells += [cause or ("refuted: " + "; ".join(refuted)) * bool(refuted)]
            lines += ["| " + " | ".join(cells) + " |"]
        machines = {json.dumps(x["facts"]) for x in found.values() if x and x["facts"]}
        for each in sorted(machines):
            said = ", ".join(f"{key} {value}" for key, value in json.loads(each).items())
            lines += ["", f"{said}."]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _columns(record: dict[str, Any] | None) -> dict[str, Any]:
    return (record or {}).get("columns") or {}


def _refutes(column: str, predicted: float, measured: dict[str, Any]) -> bool:
    if column not in measured:
        return False
    if column == "tokens_per_s":
        return bool(measured[column] < predicted / 1.3)
    return bool(measured[column] > predicted * 1.1)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float | int):
        return str(value or "")
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main(options: Options) -> None:
    if unknown := set(options.part) - PARTS.keys():
        raise SystemExit(f"--part {' '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if not (options.miniature or options.report):
        require_kernels()
    begun, device = time.monotonic(), torch.device("cpu" if options.miniature else "cuda")
    for row in [] if options.report else rows(options.miniature):
        if row.part not in (options.part or PARTS) or options.only not in row.name:
            continue
        record = record_of(options.output, row)
        again = record and (
            record["cause"].startswith(NOT_INSTALLED) or (options.retry and record["cause"])
        )
        if record and not again:
            continue
        left = 60 * options.minutes - (time.monotonic() - begun)
        if options.minutes and left < options.patience * row.seconds:
            print(f"{row.part}: {row.name}: not begun")
            break
        record = run(options.output, row, device, options.patience)
        said = ", ".join(f"{key} {_cell(value)}" for key, value in _columns(record).items())
        print(f"{row.part}: {row.name}: {record['cause'] or said}")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "training.md").write_text(markdown(options.output, options.miniature))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
