"""DistributedOptimizer over the buffers of Megatron's DistributedDataParallel."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("megatron.core.optimizer")

from mp_optim import get_megatron_optimizer
from support import megatron_gpt as gpt
from support.models import config_for


@pytest.fixture(autouse=True)
def process_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gpt.without_cuda(monkeypatch)
    gpt.initialize(dist.HashStore())
    yield
    gpt.finish()


def sharded(model: nn.Module, precision: str = "fp32", **settings: Any) -> Any:
    config = config_for(precision, use_distributed_optimizer=True, **settings)
    return get_megatron_optimizer(config, model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sharding_uses_megatron_buffers_in_place(precision):
    model = gpt.gpt(precision, distributed=True)

    def addresses() -> list[tuple[int, int]]:
        return [(param.data_ptr(), param.main_grad.data_ptr()) for param in model.parameters()]

    before, values = addresses(), [param.clone() for param in model.parameters()]
    optimizer = sharded(model, precision)
    losses = gpt.train(model, optimizer, range(6))
    assert addresses() == before and losses[-1] < losses[0]
    assert not any(map(torch.equal, model.parameters(), values))
    num_bytes = sum(param.nbytes for param in model.parameters())
    assert optimizer.metrics()["bytes_gathered"] >= num_bytes


def test_sharding_refuses_settings_that_conflict_with_megatron_buffers():
    model = gpt.gpt("fp32", distributed=True)
    for settings in (
        {"bucket_size": 5},
        {"grad_reduce_in_fp32": True},
        {"data_parallel_sharding_strategy": "optim_grads"},
    ):
        with pytest.raises(ValueError, match="DistributedDataParallel"):
            sharded(model, **settings)
    with pytest.raises(ValueError, match="overlap_param_gather=True differs from the model's ddp"):
        sharded(model, overlap_param_gather=True)
    model.module.late = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"late\.weight is in no buffer"):
        sharded(model)
    del model.module.late
    optimizer = sharded(model)
    params = optimizer.param_groups[0]["params"]
    params[0] = nn.Parameter(params[0].detach().clone())
    with pytest.raises(RuntimeError, match="was replaced after Megatron's Distributed"):
        optimizer.step()
