"""Long runs under FSDP2 keep memory and objects constant."""

from __future__ import annotations

import copy
import gc
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mp_optim
from support.one_rank import one_rank


def live_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


@pytest.mark.parametrize("offload", [0.0, 0.5])
def test_pytorch_188174_steps_under_fsdp2_keep_no_objects(offload: float) -> None:
    with one_rank():
        model = nn.Sequential(*[nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(4)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = mp_optim.AdamW(
            model.named_parameters(), lr=1e-3, offload=offload, max_grad_norm=1.0
        )

        def steps(count: int) -> None:
            for _ in range(count):
                for param in model.parameters():
                    assert isinstance(param, DTensor)
                    param.grad = torch.ones_like(param)
                optimizer.step()
                optimizer.zero_grad()

        for _ in range(2):  # Caches fill in the first round and once more after a collection.
            steps(50)
            before = live_objects()
        steps(2000)
        grown = {name: count for name, count in (live_objects() - before).items() if count > 2}
        assert grown == {}


def test_primerl_3561_offloaded_resume_keeps_group_settings_and_counts() -> None:
    def built(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        groups = [
            {"params": named[:2], "lr": 1e-2, "weight_decay": 0.1},
            {"params": named[2:], "lr": 3e-3, "betas": (0.8, 0.9)},
        ]
        return mp_optim.AdamW(groups, offload=1.0, state="8bit")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for index, param in enumerate(model.parameters()):
            if index < 2 or seed % 2:  # The second group is stepped half as often.
                values = torch.randn(param.shape, generator=generator)
                param.grad = values.to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).bfloat16()
    optimizer = built(model)
    for seed in range(4):
        step(model, optimizer, seed)
    optimizer.param_groups[1]["lr"] = 1e-3  # A schedule has set this rate.
    resumed = copy.deepcopy(model)
    later = built(resumed)
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for old, new in zip(optimizer.param_groups, later.param_groups, strict=True):
        assert {name: old[name] for name in ("lr", "betas", "weight_decay")} == {
            name: new[name] for name in ("lr", "betas", "weight_decay")
        }
    counts = [float(later.state[param]["step"]) for param in resumed.parameters()]
    assert counts == [4.0, 4.0, 2.0, 2.0]
    for seed in range(4, 7):
        step(model, optimizer, seed)
        step(resumed, later, seed)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
