"""Two gloo processes: parameters below ``fp32_state_below`` keep FP32 state in any split."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mp_optim import MegatronOptimizer, OptimizerConfig, checkpoint, get_megatron_optimizer
from mp_optim.core.flat_shard import FlatShard
from support.as_rank import as_rank

SHAPES = {"tiny": (5,), "small": (6, 16), "exact": (10, 10), "large": (10, 19)}
BELOW = 100
LAYOUTS = ("fsdp2", "optim", "optim_grads", "no_shard", "layer_wise")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self) -> torch.Tensor:
        return torch.stack([(param**2).sum() for param in self.parameters()]).sum()


def built(layout: str) -> tuple[Net, MegatronOptimizer]:
    model, fields = Net(), {}
    if layout == "fsdp2":
        fully_shard(model)
    elif layout == "layer_wise":
        fields = {"use_layer_wise_distributed_optimizer": True}
    elif layout != "alone":
        fields = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": layout}
    config = OptimizerConfig(
        lr=0.01,
        clip_grad=0.0,
        use_precision_aware_optimizer=True,
        exp_avg_dtype="uint8",
        exp_avg_sq_dtype="uint8",
        fp32_state_below=BELOW,
        **fields,
    )
    return model, get_megatron_optimizer(config, model)


def train(model: Net, optimizer: MegatronOptimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def whole(value: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, FlatShard):
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (value.start, value.local))
        pieces = [part for _, part in sorted(parts, key=lambda part: part[0])]
        return torch.cat(pieces).view(value.shape)
    return value.clone()


def perform(layout: str, folder: str) -> dict[str, Any]:
    model, optimizer = built(layout)
    train(model, optimizer, 3)
    checkpoint.save(folder, model, optimizer)
    other_model, other = built(layout)
    checkpoint.load(folder, other_model, other)
    is_small, moments, resumed = {}, {}, []
    for slot in optimizer.slots():
        name, state = optimizer.slot_name(slot), optimizer.slot_state(slot)
        known: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(known, set(optimizer.state_of(slot).coded()))
        is_small[name] = not set().union(*known)  # One rank may own the whole parameter.
        if is_small[name] and layout != "layer_wise":
            moments[name] = whole(state["exp_avg"])
        for key, value in optimizer.full_slot_state(slot).items():
            same = other.full_slot_state(slot)[key]
            mine, theirs = (getattr(each, "local", each) for each in (value, same))
            if isinstance(mine, DTensor):
                mine, theirs = mine.to_local(), theirs.to_local()
            resumed.append(torch.equal(mine, theirs))
    return {"is_small": is_small, "moments": moments, "resumed": resumed}


def main(directory: Path) -> Any:
    warnings.simplefilter("ignore")
    found = {layout: perform(layout, f"{directory}/{layout}") for layout in LAYOUTS}
    found["alone"] = perform("alone", f"{directory}/alone")
    return found


if __name__ == "__main__":
    as_rank(main)
