"""The training job that is equal for all: random weights, real bytes, the same loss and batches."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from end_to_end.contenders import CONTENDERS, Contender, Setting
from end_to_end.measure import Clock, Pinned, memory
from end_to_end.model import build
from end_to_end.rows import Columns
from training.config import DataConfig
from training.data import batch, load_corpus


class Batches:
    """Batches of token ids: bytes of the standard library through a fixed table."""

    def __init__(self, vocab: int, sequences: int, sequence: int) -> None:
        self.corpus = load_corpus(DataConfig(source="stdlib", max_megabytes=4)).train
        self.table = torch.arange(256) * 593 % vocab
        self.sequences, self.sequence = sequences, sequence

    def of_step(self, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the ids and labels of a step, int64, ``(sequences, sequence)`` each."""
        ids, labels = batch(
            self.corpus, seed=0, step=step, sequences=self.sequences, seq_length=self.sequence
        )
        return self.table[ids].to(device), self.table[labels].to(device)


def train(
    *,
    device: torch.device,
    shape: str,
    contender: str | Contender,
    sequences: int,
    sequence: int,
    micro: int,
    warmup: int,
    steps: int,
    clip: float | None = 1.0,
    lr: float = 1e-4,
) -> Columns:
    """Train, and return speed, memory and loss.

    Args:
        shape: of the model.
        contender: key of ``CONTENDERS``, or one that is not in the table.
        sequences: of a step. sequence: tokens of each. micro: sequences of a micro-batch.
        warmup: steps before the first that is timed. steps: timed steps.
        clip: norm to clip gradients to; None does not clip.
    """
    chosen = CONTENDERS[contender] if isinstance(contender, str) else contender
    pinned, clock = Pinned(), Clock(device)
    model = build(shape, device, chosen.dtype)
    pieces = sequences // micro
    setting = Setting(clip if chosen.clips else None, lr, pieces, micro, device)
    loop = chosen.build(model, setting)
    batches = Batches(model.shape.vocab, sequences, sequence)
    whole, ends, losses = [], [], []
    for step in range(warmup + steps):
        ids, labels = batches.of_step(step, device)
        start, sums = clock.now(), torch.zeros((), device=device)
        for number in range(pieces):
            part = slice(number * micro, (number + 1) * micro)
            mixed = (
                torch.autocast(device.type, torch.bfloat16) if chosen.autocast else nullcontext()
            )
            with mixed:
                loss = loop.forward(ids[part], labels[part])
            sums += loss.detach()
            loop.backward(loss, is_last=number == pieces - 1)
        between = clock.now()
        loop.step()
        end = clock.now()
        whole.append(clock.seconds(start, end))
        ends.append(clock.seconds(between, end))
        losses.append(float(sums) / pieces)
    return {
        **_speed(model.shape, statistics.median(whole[warmup:]), sequences, sequence),
        "step_ms": statistics.median(ends[warmup:]) * 1e3,
        "loss_first": losses[0],
        "loss": losses[-1],
        "clips": setting.clip is not None,
        **memory(device, pinned),
    }


def _speed(shape: Any, seconds: float, sequences: int, sequence: int) -> dict[str, float]:
    tokens = sequences * sequence
    return {
        "tokens_a_step": tokens,
        "iteration_ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "tflops": tokens * shape.flops(sequence) / seconds / 1e12,
    }
