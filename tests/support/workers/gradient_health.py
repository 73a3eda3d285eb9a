"""Two ranks train in several layouts with spikes. Each rank saves the taken steps and the norms of
the last step by layout."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mp_optim import OptimizerConfig, ProcessGroups, get_megatron_optimizer
from support.as_rank import as_rank

STEPS, SPIKES, LOSS_SPIKE = 14, (10,), 12


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def built(
    module: nn.Module, process_groups: ProcessGroups | None = None, **settings: Any
) -> tuple[nn.Module, Any]:
    config = OptimizerConfig(
        lr=0.01,
        skip_step_sigma_factor=8.0,
        skip_step_rolling_interval_length=16,
        log_param_grad_norms=2,
        **settings,
    )
    optimizer = get_megatron_optimizer(config, module, process_groups=process_groups)
    return module, optimizer


def zero(**settings: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: built(model(), use_distributed_optimizer=True, **settings)


LAYOUTS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "whole": lambda: built(model()),
    "no_shard": zero(data_parallel_sharding_strategy="no_shard"),
    "optim": zero(),
    "optim_grads": zero(data_parallel_sharding_strategy="optim_grads"),
    "fsdp": lambda: built(fully_shard(model(), mesh=init_device_mesh("cpu", (2,)))),
}


def loss_of(module: nn.Module, step: int, layout: str) -> torch.Tensor:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    if layout != "whole":
        batch = batch[4 * dist.get_rank() :][:4]
    factor = 1e4 if step in SPIKES else 1.0
    return module(batch).square().mean() * factor


def told(name: str) -> dict[str, Any]:
    module, optimizer = LAYOUTS[name]()
    taken = []
    for step in range(STEPS):
        loss = loss_of(module, step, name)
        loss.backward()
        # The loss of one rank only is a spike.
        extra = 1e3 * dist.get_rank() if step == LOSS_SPIKE else 0.0
        optimizer.health.report_loss(loss.detach() + extra)
        taken.append(bool(optimizer.step().success))
        optimizer.zero_grad()
    return {"taken": taken, "norms": dict(sorted(optimizer.health.grad_norms().items()))}


def tensor_parallel() -> dict[str, Any]:
    module = nn.Linear(3, 1)
    module.weight.data.copy_(torch.ones(1, 3))
    module.bias.data.fill_(2.0)
    module.weight.tensor_model_parallel, module.weight.partition_dim = True, 0
    ranks = dist.group.WORLD
    groups = ProcessGroups(grad_stats=ranks, tp=ranks)
    _, optimizer = built(module, optimizer="sgd", clip_grad=0.0, process_groups=groups)
    module.weight.grad = torch.full((1, 3), 1.0 + dist.get_rank())
    module.bias.grad = torch.tensor([4.0])
    optimizer.step()
    return {"norms": optimizer.health.grad_norms()}


def main(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name: told(name) for name in LAYOUTS}
        found["tensor parallel"] = tensor_parallel()
    return found


if __name__ == "__main__":
    as_rank(main)
