"""Several processes: who this one is, and what the ranks share out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mp_optim import OptimizerConfig

_SETTINGS: dict[str, dict[str, Any]] = {
    "replicated": {
        "use_distributed_optimizer": True,
        "data_parallel_sharding_strategy": "no_shard",
    },
    "zero1": {"use_distributed_optimizer": True},
    "zero2": {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads"},
    "layer_wise": {"use_layer_wise_distributed_optimizer": True},
}


def join(layout: str, device: torch.device) -> torch.device:
    """Meet the other processes that `torchrun` started; returns this one's own device.

    Raises:
        ValueError: a layout without several processes, or several processes without a layout.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if layout == "single":
        if ranks > 1:
            raise ValueError(
                f"run.layout='single' in each of {ranks} processes would train {ranks} models; "
                "choose another layout"
            )
        return device
    if "RANK" not in os.environ:
        raise ValueError(
            f"run.layout={layout!r} needs several processes: start this with torchrun "
            "--nproc-per-node N"
        )
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    if not dist.is_initialized():
        dist.init_process_group(device_id=device if device.type != "cpu" else None)
    return device


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def optimizer_config(config: OptimizerConfig, layout: str) -> OptimizerConfig:
    return dataclasses.replace(config, **_SETTINGS.get(layout, {}))


def shard_model(model: nn.Module, layout: str) -> None:
    if layout == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)


def unsynchronized(
    model: nn.Module, optimizer: Any, last: bool
) -> contextlib.AbstractContextManager[Any]:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif not last and hasattr(optimizer, "no_sync"):
        return optimizer.no_sync()  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def any_of(value: bool, device: torch.device) -> bool:
    """Whether it is true in some process."""
    if size() == 1:
        return value
    flag = torch.tensor([value], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def mean(value: float, device: torch.device) -> float:
    if size() == 1:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / size()
