"""The loop: build everything from a `TrainConfig`, step, evaluate, save, resume."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrize

import mp_optim
from training import checkpoints, ranks
from training.config import TrainConfig
from training.data import batch, load_corpus
from training.metrics import Observer, StepRecord, TrainResult, health_of
from training.models import build_model, params_dtype
from training.schedule import RunSchedule

_EVAL_SEED_OFFSET = 500_000_000


class Trainer:
    """Holds model, optimizer, scheduler and data of one run. `step` is the next step to run, from
    0.

    `num_params` counts the model's params, each once.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        layout = config.run.layout
        self.device = ranks.join(layout, _device(config.run.device))
        if config.run.global_batch_size % (config.run.micro_batch_size * ranks.size()):
            raise ValueError(
                f"run.global_batch_size={config.run.global_batch_size} is not a multiple of "
                "run.micro_batch_size="
                f"{config.run.micro_batch_size} times {ranks.size()} processes"
            )
        torch.manual_seed(config.run.seed)
        self.model = build_model(
            config.model,
            dtype=params_dtype(config.optimizer),
            device=self.device,
            seq_length=config.data.seq_length,
        )
        self.num_params = sum(p.numel() for p in self.model.parameters())
        ranks.shard_model(self.model, layout)
        optimizer = ranks.optimizer_config(config.optimizer, layout)
        overrides = mp_optim.get_standard_config_overrides(optimizer)
        self.optimizer = mp_optim.get_megatron_optimizer(
            optimizer, self.model, config_overrides=overrides
        )
        self.scheduler = RunSchedule(self.optimizer, config)
        self.corpus = load_corpus(config.data)
        self.step = 0
        self.checkpoint: Path | None = None
        if config.run.resume:
            self._resume()

    def train_step(self) -> StepRecord:
        """Run step `self.step` and count it, whether or not the optimizer skipped it."""
        started = time.perf_counter()
        run = self.config.run
        batch = self._batch(self.corpus.train, run.seed, self.step, run.global_batch_size)
        inputs, targets = (part.chunk(ranks.size())[ranks.rank()] for part in batch)
        lr = _reported_lr(self.optimizer)
        self.optimizer.zero_grad()
        loss = 0.0
        micro_batches = len(inputs) // run.micro_batch_size
        for number, (x, y) in enumerate(
            zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True), start=1
        ):
            with ranks.unsynchronized(self.model, self.optimizer, last=number == micro_batches):
                part = self._loss(x, y) / micro_batches
                self.optimizer.scale_loss(part).backward()
            loss += part.item()
        loss_scale = _as_float(self.optimizer.get_loss_scale())
        self.optimizer.health.report_loss(loss)
        result = self.optimizer.step()
        success = bool(result.success)
        if success:
            self.scheduler.step(increment=1)
        seconds = time.perf_counter() - started
        record = StepRecord(
            step=self.step,
            loss=ranks.mean(loss, self.device),
            grad_norm=None if result.grad_norm is None else _as_float(result.grad_norm),
            lr=lr,
            loss_scale=loss_scale,
            skipped=not success,
            tokens_per_s=batch[0].numel() / seconds,
            milliseconds=1e3 * seconds,
            health=health_of(self.optimizer.metrics()),
        )
        self.step += 1
        return record

    def evaluate(self) -> float:
        run = self.config.run
        self.model.eval()
        with torch.no_grad():
            losses = [
                self._loss(
                    *self._batch(
                        self.corpus.eval, run.seed + _EVAL_SEED_OFFSET, i, run.micro_batch_size
                    )
                ).item()
                for i in range(run.eval_batches)
            ]
        self.model.train()
        return sum(losses) / len(losses)

    def save(self) -> Path:
        """Save a checkpoint of everything that the next step depends on."""
        self.checkpoint = checkpoints.save(
            Path(self.config.run.output_dir),
            self.step,
            self.model,
            self.optimizer,
            self.scheduler,
            self.config.run.keep,
        )
        return self.checkpoint

    def _resume(self) -> None:
        found = checkpoints.latest(Path(self.config.run.output_dir))
        if found is not None:
            self.step = checkpoints.load(found, self.model, self.optimizer, self.scheduler)
            self.checkpoint = found

    def _batch(self, data: Tensor, seed: int, step: int, sequences: int) -> tuple[Tensor, Tensor]:
        x, y = batch(
            data, seed=seed, step=step, sequences=sequences, seq_length=self.config.data.seq_length
        )
        return x.to(self.device), y.to(self.device)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with parametrize.cached():  # float8 weights are read once, however many experts read them
            logits = self.model(inputs, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train(
    config: TrainConfig,
    observers: Sequence[Callable[[Trainer], Observer]] = (),
    trainer: Trainer | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    trainer = trainer if trainer is not None else Trainer(config)
    run = config.run
    result = TrainResult(num_params=trainer.num_params)
    watching = [make(trainer) for make in observers]
    started = time.perf_counter()
    training_seconds = 0.0
    try:
        while trainer.step < run.steps:
            begun = time.perf_counter()
            record = trainer.train_step()
            training_seconds += time.perf_counter() - begun
            result.interrupted = ranks.any_of(stop(), trainer.device)
            last = trainer.step == run.steps or result.interrupted
            if not result.interrupted and _due(run.eval_interval, trainer.step, last):
                record = dataclasses.replace(record, eval_loss=trainer.evaluate())
            result.records.append(record)
            for observer in watching:
                observer.on_step(record)
            if result.interrupted or _due(run.save_interval, trainer.step, last):
                trainer.save()
            if last:
                break
    finally:
        for observer in watching:
            observer.close()
    tokens = len(result.records) * run.global_batch_size * config.data.seq_length
    result.seconds = time.perf_counter() - started
    result.tokens_per_s = tokens / training_seconds if training_seconds else 0.0
    result.description = trainer.optimizer.describe()
    result.checkpoint = trainer.checkpoint
    return result


def _due(interval: int | None, step: int, last: bool) -> bool:
    return interval is not None and (last or step % interval == 0)


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found if found is not None else torch.device("cpu")


def _as_float(value: Tensor | float) -> float:
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def _reported_lr(optimizer: torch.optim.Optimizer) -> float:
    groups = optimizer.param_groups
    return _as_float(
        next((g for g in groups if not g.get("is_decoupled_lr", False)), groups[0])["lr"]
    )
