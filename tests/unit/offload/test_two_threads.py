"""A model with parameters on several devices produces gradients in several threads."""

import pytest
import torch
from torch import nn

from mp_optim import get_megatron_optimizer
from mp_optim.host.transfer import Transfer
from support.models import config_for
from support.offload import differing, hybrids, snapshot
from support.two_threads import Narrow, backward_in_two_threads


class NarrowTransfer(Transfer):
    """Transfer that counts calls of ``mark()`` and the largest number of threads inside ``mark()``
    at one time."""

    def __init__(self) -> None:
        self.place, self.marks = Narrow(), 0

    def mark(self) -> None:
        self.marks += 1
        self.place.passes()


def run(mode: str) -> tuple[dict[str, torch.Tensor], NarrowTransfer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    config = config_for("fp32", 1.0, offload_mode=mode, clip_grad=0.0)
    optimizer, transfer = get_megatron_optimizer(config, model), NarrowTransfer()
    for hybrid in hybrids(optimizer):
        hybrid.stepper.use_transfer(transfer, bucket_bytes=1)
    for _ in range(2):
        optimizer.zero_grad()
        if mode == "sync":
            for part in (model[3:], model[:3]):
                part(torch.ones(1, 2)).sum().backward()
        else:
            backward_in_two_threads(model[3:], model[:3], transfer.place)
        assert optimizer.step().success
    return snapshot(model, optimizer), transfer


@pytest.mark.parametrize("mode", ["overlap", "speculative"])
def test_buckets_are_queued_one_at_a_time_when_two_threads_run_backward(mode):
    expected, _ = run("sync")
    found, transfer = run(mode)
    assert transfer.place.most == 1 and transfer.marks == 2 * (12 + 1)
    assert differing(found, expected) == []
