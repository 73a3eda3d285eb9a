"""The parts of the check, in the order in which they matter.

Each runs in a process of its own (:mod:`end_to_end.runner`), because a fault on a GPU leaves the
process unusable and must not end the other parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.report import tables
from benchmarks.section import Section
from end_to_end.rows import Row
from end_to_end.runner import Results
from lab.gpu import agreement, door, places, saves, speed, waiting

LIMIT = 480
"""Seconds that a part may take."""


@dataclass(frozen=True)
class Sizes:
    """The device and the sizes of the models.

    Attributes:
        device: the device to check.
        params: elements of the model that kernels and steps are timed on.
        hybrid_params: elements of the model with state in host memory, or saved.
        rounds: of each measurement.
    """

    device: torch.device
    params: int
    hybrid_params: int
    rounds: int

    @property
    def steps(self) -> int:
        return agreement.STEPS if self.device.type == "cuda" else self.rounds

    @property
    def rate(self) -> speed.Rate:
        return speed.Rate(self.device)

    @property
    def collectives(self) -> torch.device:
        return self.device if self.device.type == "cuda" else torch.device("cpu")


PARTS: dict[str, tuple[str, Callable[[Sizes], Section]]] = {
    "door": ("the package's door to the accelerator works", lambda s: door.door(s.device)),
    "backend": (
        "auto chooses the Triton kernels, and which Triton",
        lambda s: agreement.chosen(s.device),
    ),
    "bits": ("the same bits in every place", lambda s: agreement.bits(s.device, s.steps)),
    "ranks": (
        "ZeRO and FSDP2 of one rank, by NCCL, as no ranks",
        lambda s: agreement.ranks(s.collectives, s.steps),
    ),
    "syncs": ("a step does not wait for the device", lambda s: waiting.synchronisations(s.device)),
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
        lambda s: saves.saves(s.device, s.hybrid_params, s.rounds),
    ),
    "many": ("10,000 small tensors", lambda s: speed.many(s.rate, s.params // 10, s.rounds)),
}
"""The meaning of each part, and its function."""


def section_of(*, device: torch.device, part: str, **sizes: int) -> dict[str, Any]:
    """Run a part, and return its section as plain data."""
    return asdict(PARTS[part][1](Sizes(device, **sizes)))


def rows(sizes: Mapping[str, int]) -> list[Row]:
    """Return a row for each part.

    Args:
        sizes: of :class:`Sizes`, without the device.
    """
    call = "lab.gpu.parts:section_of"
    return [Row(name, call, {"part": name, **sizes}, LIMIT) for name in PARTS]


def is_done(results: Results, row: Row, machine: Mapping[str, Any]) -> bool:
    """True if a part has succeeded on such a machine, with these versions."""
    record = results.record("", row)
    if record is None or record["cause"]:
        return False
    facts: Mapping[str, Any] = record["facts"]
    return all(facts.get(key) == value for key, value in machine.items() if key != "date")


def write(results: Results, wanted: list[Row]) -> None:
    """Write all results as ``gpu.json`` and ``gpu.md``, under the machine of each."""
    parts: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    for row in wanted:
        if (record := results.record("", row)) is None:
            continue
        said = {"section": record["columns"], "cause": record["cause"]}
        parts[row.name] = {**said, "seconds": record["took"], "machine": record["facts"]}
        said = ", ".join(f"{key} {value}" for key, value in record["facts"].items()) + "."
        lines += [said, ""] if record["facts"] and said not in lines else []
        if record["columns"] is None:
            lines += [f"## {row.name}", "", f"Failed: {record['cause']}", ""]
        else:
            lines.append(tables([Section(**record["columns"])]))
    file = results.folder.with_suffix(".json")
    file.write_text(json.dumps({"parts": parts}, indent=1) + "\n")
    file.with_suffix(".md").write_text("\n".join(lines))
