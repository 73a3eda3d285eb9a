#!/usr/bin/env python
"""Train one small mixture of experts with every form of optimizer state, over several seeds.

python tools/benchmark_quality.py --steps 2000 --output docs/benchmarks
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import tyro
from measuring.kernels import require_kernels
from rich.progress import track

from benchmarks.quality_report import write
from mp_optim import OptimizerConfig
from mp_optim.kernels.native_library import set_host_threads
from training.config import DataConfig, ModelConfig, RunConfig, SchedulerConfig, TrainConfig
from training.loop import train


def _compact(moments: str, bits: int | str = 16, **more: Any) -> dict[str, Any]:
    remainder = {} if bits == 16 else {"param_remainder_bits": bits}
    return {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
        **remainder,
        **more,
    }


def _offload(fraction: float) -> dict[str, Any]:
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}


FORMS: dict[str, dict[str, Any]] = {
    "FP32": {},
    "bf16 moments, 16-bit remainder": _compact("bfloat16"),
    "bf16 moments, 16-bit remainder, stochastic": _compact("bfloat16", stochastic_rounding=True),
    "fp16 moments, 16-bit remainder": _compact("float16"),
    "8-bit moments, 16-bit remainder": _compact("uint8"),
    "4-bit and 8-bit moments, 16-bit remainder": {**_compact("uint8"), "exp_avg_dtype": "uint4"},
    "8-bit moments, 8-bit remainder": _compact("uint8", 8),
    "8-bit moments, 8-bit remainder, stochastic": _compact("uint8", 8, stochastic_rounding=True),
    "bf16 moments, no main params": _compact("bfloat16", 0, stochastic_rounding=True),
}
"""Forms of state by name; the first is what the others are compared with."""

FLOAT8: dict[str, tuple[str, dict[str, Any]]] = {
    f"float8 weights, {scale}{place}": (word, settings)
    for scale, word in (("a scale each", "tensor"), ("a scale a row", "row"))
    for place, settings in (
        ("", {}),
        (", half on the host", _offload(0.5)),
        (", all on the host", _offload(1.0)),
    )
}
"""Model weights in 8 bits by name: where their scales are, and where they are stepped."""


@dataclass
class Options:
    """What to train. Besides the forms of state there are those of float8 weights, which have to be
    named."""

    steps: int = 2000
    seeds: int = 3
    jobs: int = os.cpu_count() or 1
    """Runs at a time, one thread each."""
    lr: float = 3e-3
    """The highest learning rate, which falls to a tenth."""
    forms: tuple[str, ...] = tuple(FORMS)
    output: Path | None = None
    """Folder for quality.json, quality.md and quality.png; runs that are in the first already are
    not done again."""


@dataclass(frozen=True)
class Run:
    """One training run and its outcome: held-out loss at the end, and the training losses."""

    form: str
    seed: int
    eval_loss: float
    losses: list[float]


def run_config(form: str, seed: int, steps: int, lr: float = 3e-3) -> TrainConfig:
    """A mixture of experts small enough to train often."""
    weights, settings = FLOAT8[form] if form in FLOAT8 else ("none", FORMS[form])
    return TrainConfig(
        model=ModelConfig(
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            float8_weights=weights,
        ),
        data=DataConfig(source="stdlib", seq_length=128, max_megabytes=16.0),
        optimizer=OptimizerConfig(
            lr=lr,
            min_lr=lr / 10,
            weight_decay=0.1,
            adam_beta2=0.99,
            clip_grad=1.0,
            bf16=True,
            **settings,
        ),
        scheduler=SchedulerConfig(lr_warmup_steps=steps // 20),
        run=RunConfig(
            steps=steps,
            global_batch_size=8,
            micro_batch_size=8,
            seed=seed,
            device="cpu",
            eval_interval=steps,
            eval_batches=64,
        ),
    )


def run_one(job: tuple[str, int, int, float]) -> Run:
    """Train once, on one thread."""
    torch.set_num_threads(1)
    set_host_threads(1)
    form, *settings = job
    records = train(run_config(form, *settings)).records
    return Run(
        form,
        job[1],
        float(records[-1].eval_loss or float("nan")),
        [record.loss for record in records],
    )


def main(options: Options) -> None:
    require_kernels()
    known = {(run.form, run.seed): run for run in _found(options)}
    jobs = [
        (form, 1000 + seed, options.steps, options.lr)
        for seed in range(options.seeds)
        for form in options.forms
    ]
    missing = [job for job in jobs if job[:2] not in known]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for run in track(pool.map(run_one, missing), total=len(missing), description="training"):
            known[run.form, run.seed] = run
            if options.output is not None:
                options.output.mkdir(parents=True, exist_ok=True)
                _store(options).write_text(
                    json.dumps([dataclasses.asdict(run) for run in known.values()])
                )
    runs = [known[job[:2]] for job in jobs]
    for form in options.forms:
        found = [run.eval_loss for run in runs if run.form == form]
        print(
            f"{form:45s} {statistics.mean(found):.4f}  "
            f"{' '.join(f'{value:.4f}' for value in found)}"
        )
    if options.output is not None:
        write(options.output, [dataclasses.asdict(run) for run in runs], options.steps)


def _store(options: Options) -> Path:
    """Where finished runs are kept, so that a broken off benchmark goes on where it was."""
    assert options.output is not None
    return options.output / "quality.json"


def _found(options: Options) -> list[Run]:
    """Runs of as many steps that finished before."""
    if options.output is None or not _store(options).exists():
        return []
    runs = [Run(**run) for run in json.loads(_store(options).read_text())]
    return [run for run in runs if len(run.losses) == options.steps]


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
