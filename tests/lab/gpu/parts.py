"""The parts of the check, in the order in which they matter: each runs in a process of its own, and
writes its result as soon as it has one.

A fault on a GPU leaves the process unusable, so one part's must not take the others with it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.gpu.report import markdown
from support.launch import PATH, ROOT

LIMIT = 480
"""Seconds that a part may take."""


@dataclass(frozen=True)
class Part:
    """What is run by itself.

    Attributes:
        about: what it shows.
        function: ``module:function`` below ``lab.gpu``; called with :class:`Sizes`.
    """

    about: str
    function: str


@dataclass(frozen=True)
class Sizes:
    """On what and how large.

    Attributes:
        device: as torch has it, or ``simulated``, which tries the parts themselves.
        params: elements of the model that kernels and steps are timed on.
        hybrid_params: elements of the model that is stepped partly on the host.
    """

    device: str
    params: int
    hybrid_params: int
    rounds: int


PARTS = {
    "door": Part("the package's door to the accelerator works", "run:door"),
    "backend": Part("auto chooses the Triton kernels, and which Triton", "run:backend"),
    "bits": Part("the same bits in every place", "run:bits"),
    "ranks": Part("ZeRO and FSDP2 of one rank, by NCCL, as no ranks", "run:ranks"),
    "syncs": Part("a step does not wait for the device", "run:syncs"),
    "rates": Part("rates of copies, the limit of the rows below", "run:rates"),
    "kernels": Part("the kernels against apex, Transformer Engine, torch", "run:kernels"),
    "steps": Part("the full step against an unfused sequence", "run:steps"),
    "hybrid": Part("steps at offload fractions, bytes over the bus", "run:hybrids"),
    "places": Part(
        "state on the host, streamed, or both, against the model", "run:places_of_state"
    ),
    "saves": Part("how long a save in the background blocks, against a save", "run:saves"),
    "verdict": Part("time until step() returns", "run:verdicts"),
    "many": Part("10,000 small tensors", "run:many"),
    "tests-marked": Part("tests marked gpu", "suite:marked"),
    "tests-conformance": Part("conformance of every backend", "suite:conformance"),
    "tests-triton-1": Part("Triton kernels, a third of the tests", "suite:triton_1"),
    "tests-triton-2": Part("Triton kernels, the next third", "suite:triton_2"),
    "tests-triton-3": Part("Triton kernels, the rest", "suite:triton_3"),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a part.

    Attributes:
        section: rows and what is missing; None if it failed.
        cause: one line about why it failed; empty if it did not.
        machine: what it ran on.
    """

    section: dict[str, Any] | None
    cause: str
    seconds: float
    machine: dict[str, Any]


def run_here(name: str, sizes: Sizes) -> dict[str, Any]:
    """Run a part in this process; returns its section as plain data."""
    module, _, function = PARTS[name].function.partition(":")
    measure = getattr(importlib.import_module(f"lab.gpu.{module}"), function)
    return asdict(measure(sizes))


def run_apart(name: str, sizes: Sizes, machine: dict[str, Any], limit: float = LIMIT) -> Outcome:
    """Run a part in a process of its own, which is ended after ``limit`` seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "lab.gpu.run", name, json.dumps(asdict(sizes))]
    try:
        section, cause = _read(_ended(command, limit))
    except subprocess.TimeoutExpired:
        section, cause = None, f"took more than {limit:.0f} s"
    return Outcome(section, cause, round(time.perf_counter() - started, 1), machine)


def _ended(command: list[str], limit: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, or end it after so many seconds and all that it began."""
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
    """The section on the last line of the output, or why there is none."""
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
        """Whether a part has succeeded on such a machine, with these versions."""
        outcome = self.outcomes.get(name)
        if outcome is None or outcome.cause:
            return False
        return _without_date(outcome.machine) == _without_date(machine)

    def add(self, name: str, outcome: Outcome) -> None:
        """Keep a part's outcome; written at once, so that an interrupted run leaves what it has."""
        self.outcomes[name] = outcome
        if self.folder is None:
            return
        self._file(name).parent.mkdir(parents=True, exist_ok=True)
        self._file(name).write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        ordered = {name: asdict(self.outcomes[name]) for name in PARTS if name in self.outcomes}
        text = json.dumps({"parts": ordered}, indent=1)
        (self.folder / "gpu.json").write_text(text + "\n")
        (self.folder / "gpu.md").write_text(markdown(ordered))


def _without_date(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in machine.items() if key != "date"}
