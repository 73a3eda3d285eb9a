"""Four gloo processes with parameters split by tensor parallelism and FSDP2 on nested meshes."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mp_optim import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from support.as_rank import as_rank


class Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(hidden)
        self.up, self.down = nn.Linear(9, hidden), nn.Linear(hidden, 7)
        self.stack = nn.Parameter(torch.randn(3, 7, 5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return torch.einsum("bi,eij->bej", y, self.stack)


def spread(model: Net, shape: tuple[int, ...]) -> DeviceMesh:
    names = ("copy", "dp", "tp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"] if len(shape) == 2 else mesh["copy", "dp"])
    return mesh


def built(model: nn.Module, rule: str, **more: Any) -> MegatronOptimizer:
    settings = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "optimizer": rule.split()[0],
        "clip_grad": 0.5,
        **more,
    }
    return get_megatron_optimizer(OptimizerConfig(**settings), model)


def gradient(step: int, index: int, param: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(tuple(param.shape), generator=generator)


def part_of(value: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return value
    copies = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(value, like.device_mesh, copies, run_check=False).redistribute(
        placements=like.placements
    )


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


class Sequence(nn.Module):
    """Model with partial sums as norm gradients, as sequence parallelism gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.up, self.down = (nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def sequence_inputs(step: int) -> Tensor:
    return torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))


def sequence_parallel(mode: str | None = None, sharded: bool = True) -> dict[str, Any]:
    model = Sequence()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)) if sharded else None
    if mesh is not None:
        parallelize_module(
            model,
            mesh,
            {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Replicate()),
            },
        )
    host = (
        {}
        if mode is None
        else {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "offload_mode": mode,
        }
    )
    optimizer = built(model, "adam", **host)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        x = sequence_inputs(step)
        model(
            x if mesh is None else distribute_tensor(x, mesh, [Shard(1)])
        ).square().mean().backward()
        norms.append(optimizer.step().grad_norm)
    return {"norms": norms, "params": {name: whole(p) for name, p in model.named_parameters()}}


def released(mode: str, shape: tuple[int, ...], releases: bool) -> dict[str, Any]:
    model = Net(16)
    if len(shape) == 1:
        fully_shard(model, mesh=init_device_mesh("cpu", shape))
    else:
        spread(model, shape)
    optimizer = built(
        model,
        "adam",
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
        clip_grad=0.5,
        offload_mode=mode,
        release_gradients=releases,
        offload_bucket_bytes=1,
    )
    norms, gone = [], []
    for step in range(4):
        optimizer.zero_grad()
        for part in range(1 + step % 2):
            x = torch.randn(6, 9, generator=torch.Generator().manual_seed(10 * step + part))
            model(x).square().mean().backward()
        gone.append({name for name, param in model.named_parameters() if param.grad is None})
        optimizer.gradients_ready()
        gone.append({name for name, param in model.named_parameters() if param.grad is None})
        norms.append(optimizer.step().grad_norm)
    params = {name: whole(param) for name, param in model.named_parameters()}
    return {"gone": gone, "norms": norms, "params": params}


def main(directory: Path) -> Any:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    found["sequence"] = {str(mode): sequence_parallel(mode) for mode in (None, "overlap")}
    found["released"] = {
        (mode, shape, releases): released(mode, shape, releases)
        for shape in ((4,), (2, 2))
        for mode in ("overlap", "speculative")
        for releases in (False, True)
    }
    return found


if __name__ == "__main__":
    as_rank(main)
