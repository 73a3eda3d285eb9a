"""The training job that is equal for all: random weights, real bytes, the same loss and batches."""

from __future__ import annotations

import statistics
from contextlib import nullcontext

import torch
from torch import Tensor

from benchmarks.timing import Clock
from end_to_end.contenders import CONTENDERS, Contender, Setting
from end_to_end.measure import memory
from end_to_end.model import build
from end_to_end.rows import Columns
from training.config import DataConfig
from training.data import batch, load_corpus


class Job:
    """A model, its optimizer and its batches.

    Args:
        shape: of the model.
        sequences: of a step. sequence: tokens of each. micro: sequences of a micro-batch.
        clip: norm to clip gradients to; None does not clip.
        lr: learning rate, constant.
    """

    def __init__(
        self,
        contender: Contender,
        device: torch.device,
        shape: str,
        sequences: int,
        sequence: int,
        micro: int,
        clip: float | None = 1.0,
        lr: float = 1e-4,
    ) -> None:
        self.device, self.sequences, self.sequence, self.micro = device, sequences, sequence, micro
        # FP32 params start at the values of bf16 ones
        self.model = build(shape, device, torch.bfloat16).to(contender.dtype)
        self._is_mixed = contender.autocast
        self._pieces = sequences // micro
        self.setting = Setting(clip if contender.clips else None, lr, self._pieces, micro, device)
        self.loop = contender.build(self.model, self.setting)
        self._corpus = load_corpus(DataConfig(source="stdlib", max_megabytes=4)).train
        self._table = torch.arange(256) * 593 % self.model.shape.vocab

    def backward(self, step: int) -> Tensor:
        """Add the gradients of a step's batch, and return its mean loss, FP32, 0-D."""
        size = {"sequences": self.sequences, "seq_length": self.sequence}
        both = batch(self._corpus, seed=0, step=step, **size)
        ids, labels = (self._table[each].to(self.device).split(self.micro) for each in both)
        total = torch.zeros((), device=self.device)
        kind = self.device.type
        for number, piece in enumerate(zip(ids, labels, strict=True)):
            with torch.autocast(kind, torch.bfloat16) if self._is_mixed else nullcontext():
                loss = self.loop.forward(*piece)
            total += loss.detach()
            self.loop.backward(loss, is_last=number == self._pieces - 1)
        return total / self._pieces


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
) -> Columns:
    """Train, and return speed, memory and loss.

    Args:
        contender: key of ``CONTENDERS``, or one that is not in the table.
        warmup: steps before the first that is timed. steps: timed steps.
        shape, sequences, sequence, micro: of :class:`Job`.
    """
    chosen = CONTENDERS[contender] if isinstance(contender, str) else contender
    job, clock = Job(chosen, device, shape, sequences, sequence, micro), Clock(device)
    whole, ends, losses = [], [], []
    for step in range(warmup + steps):
        start = clock.now()
        loss = job.backward(step)
        between = clock.now()
        job.loop.step()
        end = clock.now()
        whole.append(clock.seconds(start, end))
        ends.append(clock.seconds(between, end))
        losses.append(float(loss))
    seconds, tokens = statistics.median(whole[warmup:]), sequences * sequence
    return {
        "tokens_a_step": tokens,
        "iteration_ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "tflops": tokens * job.model.shape.flops(sequence) / seconds / 1e12,
        "step_ms": statistics.median(ends[warmup:]) * 1e3,
        "loss_first": losses[0],
        "loss": losses[-1],
        "clips": job.setting.clip is not None,
        **memory(device),
    }
