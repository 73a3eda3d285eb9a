"""Train a functional case with the trainer of `tools/`, and compare its values with golden values.

A case is a folder with `model_config.yaml` (the sections of `tools/train.py`, and `test`) and
`golden_values.json`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from support.launch import ROOT
from training.config import TrainConfig
from training.loading import config_from_mapping
from training.loop import Trainer, train

CASES = ROOT / "tests" / "functional" / "test_cases"
# Other CPUs sum in other orders (vector width, threads, library). This moves a loss by a few ulps
# of
# the model's dtype at first, and twenty steps of training amplify the difference. In FP32 it stays
# near 1e-6. bf16 has 8 bits and fp16 has 11, and the router of a mixture of experts turns an ulp
# into
# another expert. A wrong step differs more: a missing bias correction, decay or clip moves these
# losses by 0.05 or more.
LOSS_ATOL = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 3e-2}
GRAD_NORM_RTOL = {"fp32": 1e-2, "fp16": 0.15, "bf16": 0.2}


@dataclass(frozen=True)
class CaseOptions:
    same_as: str | None = None
    resume_at: int | None = None


@dataclass
class Curve:
    """Compared values of a case, one per step."""

    losses: list[float]
    grad_norms: list[float | None]
    skipped: list[bool]
    loss_scales: list[float]

    def __add__(self, other: Curve) -> Curve:
        return Curve(
            *(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self))
        )


def case_names() -> list[str]:
    return sorted(path.parent.name for path in CASES.glob("*/model_config.yaml"))


def load_case(name: str, root: Path = CASES) -> tuple[TrainConfig, CaseOptions]:
    values: Mapping[str, Any] = yaml.safe_load(
        (root / name / "model_config.yaml").read_text(encoding="utf-8")
    )
    sections = {key: value for key, value in values.items() if key != "test"}
    return config_from_mapping(sections, TrainConfig()), CaseOptions(**values.get("test", {}))


def precision_of(config: TrainConfig) -> str:
    if config.optimizer.bf16:
        return "bf16"
    return "fp16" if config.optimizer.fp16 else "fp32"


def run_case(name: str, output_dir: Path) -> Curve:
    """Train a case on one thread, so that sums have a fixed order."""
    config, options = load_case(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if options.resume_at is None:
            return _train(config)
        return _train_interrupted(config, options.resume_at, output_dir)
    finally:
        torch.set_num_threads(threads)


def _train(config: TrainConfig, trainer: Trainer | None = None) -> Curve:
    result = train(config, trainer=trainer)
    return Curve(result.losses, result.grad_norms, result.skipped, result.loss_scales)


def _train_interrupted(config: TrainConfig, at: int, output_dir: Path) -> Curve:
    """Train `at` steps, save, and continue in new objects that read only the files on disk."""
    scheduler = dataclasses.replace(config.scheduler, lr_decay_steps=config.run.steps)
    run = dataclasses.replace(config.run, output_dir=str(output_dir))
    first = dataclasses.replace(
        config, scheduler=scheduler, run=dataclasses.replace(run, steps=at, save_interval=at)
    )
    second = dataclasses.replace(
        config, scheduler=scheduler, run=dataclasses.replace(run, resume=True)
    )
    before = _train(first)
    torch.manual_seed(0)
    trainer = Trainer(second)
    assert trainer.step == at, f"resumed at step {trainer.step}, saved at {at}"
    return before + _train(second, trainer)


def golden_path(name: str) -> Path:
    """Return the path of a case's golden values, or of the golden values of the case that it
    repeats."""
    _, options = load_case(name)
    return CASES / (options.same_as or name) / "golden_values.json"


def load_golden(name: str) -> Curve:
    return Curve(**json.loads(golden_path(name).read_text(encoding="utf-8"))["curve"])


def differences(curve: Curve, golden: Curve, precision: str) -> list[str]:
    found = []
    if curve.skipped != golden.skipped:
        found.append(f"skipped steps {curve.skipped} instead of {golden.skipped}")
    if curve.loss_scales != golden.loss_scales:
        found.append(f"loss scales {curve.loss_scales} instead of {golden.loss_scales}")
    if len(curve.losses) != len(golden.losses):
        return [*found, f"{len(curve.losses)} steps instead of {len(golden.losses)}"]
    for step, (loss, expected) in enumerate(zip(curve.losses, golden.losses, strict=True)):
        if not abs(loss - expected) <= LOSS_ATOL[precision]:
            found.append(f"step {step}: loss {loss} instead of {expected}")
    for step, (norm, want) in enumerate(zip(curve.grad_norms, golden.grad_norms, strict=True)):
        if not _near(norm, want, GRAD_NORM_RTOL[precision]):
            found.append(f"step {step}: grad norm {norm} instead of {want}")
    return found


def _near(value: float | None, expected: float | None, rtol: float) -> bool:
    if value is None or expected is None:
        return value is expected
    return abs(value - expected) <= rtol * abs(expected)
