"""The parts of the check, in the order in which they matter: each runs in a process of its own, and
writes its result as soon as it has one.

A fault on a GPU leaves the process unusable, so it must not end the other parts. ``python -m
lab.gpu.parts PART SIZES`` runs one part and prints its section as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.section import Section
from lab.gpu import agreement, door, places, saves, speed, waiting
from support.accelerator.simulation import device_at
from support.accelerator.stand_in import simulated_accelerator
from support.launch import PATH, ROOT

LIMIT = 480
"""Seconds that a part may take."""


@dataclass(frozen=True)
class Sizes:
    """The device and the sizes of the models.

    Attributes:
        device: as torch has it, or ``simulated``, which tries the parts themselves.
        params: elements of the model that kernels and steps are timed on.
        hybrid_params: elements of the model with state in host memory, or saved.
        rounds: of each measurement.
    """

    device: str
    params: int
    hybrid_params: int
    rounds: int

    @property
    def place(self) -> torch.device:
        return torch.device(self.device)

    @property
    def steps(self) -> int:
        return agreement.STEPS if self.place.type == "cuda" else self.rounds

    @property
    def rate(self) -> speed.Rate:
        return speed.Rate(self.place)

    @property
    def collectives(self) -> torch.device:
        return self.place if self.place.type == "cuda" else torch.device("cpu")


PARTS: dict[str, tuple[str, Callable[[Sizes], Section]]] = {
    "door": ("the package's door to the accelerator works", lambda s: door.door(s.place)),
    "backend": (
        "auto chooses the Triton kernels, and which Triton",
        lambda s: agreement.chosen(s.place),
    ),
    "bits": ("the same bits in every place", lambda s: agreement.bits(s.place, s.steps)),
    "ranks": (
        "ZeRO and FSDP2 of one rank, by NCCL, as no ranks",
        lambda s: agreement.ranks(s.collectives, s.steps),
    ),
    "syncs": ("a step does not wait for the device", lambda s: waiting.synchronisations(s.place)),
    "rates": (
        "rates of copies, the limit of the rows below",
        lambda s: speed.rates(s.rate, s.rounds),
    ),
    "kernels": (
        "the kernels against apex, Transformer Engine, torch",
        lambda s: speed.kernels(s.rate, s.params, s.rounds),
    ),
    "steps": (
        "the full step against an unfused sequence",
        lambda s: speed.steps(s.rate, s.params, s.rounds),
    ),
    "places": (
        "state on the host or streamed, against the model",
        lambda s: places.places(s.rate, s.hybrid_params, s.rounds),
    ),
    "saves": (
        "how long a save in the background blocks, against a save",
        lambda s: saves.saves(s.place, s.hybrid_params, s.rounds),
    ),
    "many": ("10,000 small tensors", lambda s: speed.many(s.rate, s.params // 10, s.rounds)),
}
"""The meaning of each part, and its function."""


@dataclass(frozen=True)
class Outcome:
    """The result of a part.

    Attributes:
        section: rows and missing contenders; None if it failed.
        cause: one line about why it failed; empty if it did not.
        machine: GPU, driver and versions.
    """

    section: dict[str, Any] | None
    cause: str
    seconds: float
    machine: dict[str, Any]


def run_here(name: str, sizes: Sizes) -> dict[str, Any]:
    """Run a part in this process, and return its section as plain data."""
    _, measure = PARTS[name]
    if sizes.device != "simulated":
        return asdict(measure(sizes))
    with simulated_accelerator():
        return asdict(measure(replace(sizes, device=str(device_at(1)))))


def run_apart(name: str, sizes: Sizes, machine: dict[str, Any], limit: float = LIMIT) -> Outcome:
    """Run a part in a process of its own, which is ended after ``limit`` seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "lab.gpu.parts", name, json.dumps(asdict(sizes))]
    try:
        section, cause = _read(_ended(command, limit))
    except subprocess.TimeoutExpired:
        section, cause = None, f"took more than {limit:.0f} s"
    return Outcome(section, cause, round(time.perf_counter() - started, 1), machine)


def _ended(command: list[str], limit: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, or end it and its processes after ``limit`` seconds."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PATH},
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=limit)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def _read(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any] | None, str]:
    """Return the section on the last line of the output, or the reason why there is none."""
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode == 0 and last:
        return json.loads(last[0]), ""
    said = [line for line in done.stderr.splitlines() if line.strip()]
    why = said[-1].strip() if said else f"ended with {done.returncode}, without a word"
    return None, why[:300]


class Results:
    """A folder of results: ``gpu/<part>.json``, and all of them in ``gpu.json`` and ``gpu.md``."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.outcomes: dict[str, Outcome] = {}
        for name in PARTS if folder is not None else ():
            file = self._file(name)
            if file.exists():
                self.outcomes[name] = Outcome(**json.loads(file.read_text()))

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / "gpu" / f"{name}.json"

    def is_done(self, name: str, machine: Mapping[str, Any]) -> bool:
        """True if a part has succeeded on such a machine, with these versions."""
        outcome = self.outcomes.get(name)
        if outcome is None or outcome.cause:
            return False
        return {**outcome.machine, "date": ""} == {**machine, "date": ""}

    def add(self, name: str, outcome: Outcome) -> None:
        """Write a part's outcome at once, so that an interrupted run keeps it."""
        self.outcomes[name] = outcome
        if self.folder is None:
            return
        self._file(name).parent.mkdir(parents=True, exist_ok=True)
        self._file(name).write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        ordered = {name: asdict(self.outcomes[name]) for name in PARTS if name in self.outcomes}
        text = json.dumps({"parts": ordered}, indent=1)
        (self.folder / "gpu.json").write_text(text + "\n")
        (self.folder / "gpu.md").write_text(markdown(ordered))


def markdown(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table for each part, under its machine; parts that failed with the cause."""
    lines: list[str] = []
    machine: Mapping[str, Any] = {}
    for name, outcome in outcomes.items():
        if outcome["machine"] != machine:
            machine = outcome["machine"]
            facts = [f"{key} {value}" for key, value in machine.items() if value]
            lines += [", ".join(facts) + ".", ""]
        if outcome["cause"]:
            lines += [f"### {name}", "", f"Failed: {outcome['cause']}", ""]
        else:
            lines += _table(outcome["section"])
    return "\n".join(lines)


def _table(section: Mapping[str, Any]) -> list[str]:
    columns = list(dict.fromkeys(key for row in section["rows"].values() for key in row))
    head = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines = [f"### {section['title']}", "", *head]
    for row, values in section["rows"].items():
        cells = [_cell(values.get(key)) for key in columns]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    missing = [f"Missing: {what} ({why})." for what, why in section["missing"].items()]
    return [*lines, "", *missing, ""]


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3f}"


if __name__ == "__main__":
    print(json.dumps(run_here(sys.argv[1], Sizes(**json.loads(sys.argv[2])))))
