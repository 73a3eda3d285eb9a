"""Results of a run, and the JSON lines with the numbers of each step."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class StepRecord:
    step: int
    loss: float
    grad_norm: float | None
    lr: float
    loss_scale: float
    skipped: bool
    tokens_per_s: float
    milliseconds: float | None = None
    eval_loss: float | None = None
    health: dict[str, float] = field(default_factory=dict)


_OF_HEALTH = ("skip_limit/", "param_grad_norm/", "update_")


def health_of(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(_OF_HEALTH)}


@dataclass
class TrainResult:
    records: list[StepRecord] = field(default_factory=list)
    tokens_per_s: float = 0.0
    seconds: float = 0.0
    num_params: int = 0
    description: Any = None
    """What `optimizer.describe()` said."""
    checkpoint: Path | None = None
    interrupted: bool = False
    """Stopped before its last step, and saved."""
    paths: dict[str, Path] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]

    @property
    def grad_norms(self) -> list[float | None]:
        return [record.grad_norm for record in self.records]

    @property
    def skipped(self) -> list[bool]:
        return [record.skipped for record in self.records]

    @property
    def loss_scales(self) -> list[float]:
        return [record.loss_scale for record in self.records]

    @property
    def eval_loss(self) -> float | None:
        return next((r.eval_loss for r in reversed(self.records) if r.eval_loss is not None), None)


class Observer(Protocol):
    def on_step(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a step. On a resumed run, lines of steps that are about to be run again are
    dropped."""

    def __init__(self, path: Path, first_step: int) -> None:
        kept = [record for record in read_records(path) if record.step < first_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        for record in kept:
            self.on_step(record)

    def on_step(self, record: StepRecord) -> None:
        values = {
            name: value
            for name, value in dataclasses.asdict(record).items()
            if name not in ("eval_loss", "health") or value
        }
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[StepRecord]:
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(StepRecord(**json.loads(line)))
        except json.JSONDecodeError:
            break
    return records
