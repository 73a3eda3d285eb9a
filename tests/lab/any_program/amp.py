"""Steps by torch's GradScaler."""

from __future__ import annotations

import torch
from torch.amp import GradScaler

from lab.any_program.gradients import loss, own_memory
from lab.any_program.oracle import Oracle
from lab.any_program.stepping import compare_step
from lab.any_program.subject import Subject, need

MODES = ("step", "unscale", "clip", "twice")
"""``scaler.step`` alone, after ``unscale_``, after ``unscale_`` and clipping, and for a sum of two
backward passes."""


def new_scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=256.0, growth_interval=2)


def train(
    subject: Subject, oracle: Oracle, scaler: GradScaler, seed: int, mode: str, size: str
) -> None:
    optimizer = subject.optimizer
    optimizer.zero_grad()
    own_memory(subject)
    for number in range(2 if mode == "twice" else 1):
        value = loss(subject, seed + number, set(), size)
        need(value is not None)
        scaler.scale(value).backward()
    params = [param for _, param in subject.params() if param.grad is not None]
    need(any(param.numel() for param in params))
    if mode in ("unscale", "clip"):
        scaler.unscale_(optimizer)
    if mode == "clip":
        torch.nn.utils.clip_grad_norm_(params, 0.5)
    result = scaler.step(optimizer)
    scaler.update()
    if all(bool(param.grad.isfinite().all()) for param in params):
        subject.bind(oracle)
        compare_step(oracle.step(subject.own_grads(oracle), subject.place), result)
    else:
        assert result is None, "GradScaler found an inf or nan, and a step was taken"
