"""Backward passes and steps, compared with the oracle's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lab.any_program import gradients
from lab.any_program.oracle import Oracle, Outcome
from lab.any_program.subject import Subject


def go_backward(
    subject: Subject, seed: int, micro: int, unused: set[int], hold: bool, size: str
) -> None:
    """Gradients of some micro-batches, which are added to those that are there.

    Args:
        unused: indices of parameters without a part in the loss.
        hold: all but the last are in ``no_sync``.
    """
    optimizer = subject.optimizer
    gradients.own_memory(subject)
    for number in range(micro):
        loss = gradients.loss(subject, seed + number, unused, size)
        if loss is None:
            return
        hold_now = hold and number < micro - 1 and hasattr(optimizer, "no_sync")
        with optimizer.no_sync() if hold_now else contextlib.nullcontext():
            optimizer.scale_loss(loss).backward()


def take_step(subject: Subject, oracle: Oracle, closure: bool) -> None:
    grads = subject.own_grads(oracle)
    subject.bind(oracle)
    expected = oracle.step(grads, subject.place)
    with flush_mode(subject.flushes):
        result = subject.optimizer.step(lambda: 7.0) if closure else subject.optimizer.step()
    if closure:
        assert result == 7.0
    else:
        compare_step(expected, result)
    now = subject.grads()
    changed = [
        name for name, grad in grads.items() if not np.array_equal(grad, now[name], equal_nan=True)
    ]
    assert changed == [], "the step changed gradients"
    if oracle.scaler:
        assert float(subject.optimizer.get_loss_scale()) == oracle.scaler.scale


@contextlib.contextmanager
def flush_mode(flushes: bool) -> Iterator[None]:
    """Set the mode of this thread for a block, which must leave the mode as it is."""
    torch.set_flush_denormal(flushes)
    try:
        yield
        assert (float(torch.tensor(1e-40) * 1.0) == 0.0) == flushes, "the flush mode has changed"
    finally:
        torch.set_flush_denormal(False)


def compare_step(expected: Outcome, result: Any) -> None:
    found, wanted = tuple(result), (expected.success, expected.norm, expected.zeros)
    assert found == wanted, f"the step says {found}, should say {wanted}"
