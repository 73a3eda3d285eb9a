"""Two gloo processes with one optimizer over DTensors of two 1-D meshes and one 2-D mesh, and over
a replicated plain tensor."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import mp_optim
from support.as_rank import as_rank

STEPS = 3
NORM = 0.25
SHAPES = {"shard": (6, 4), "other_shard": (4, 6), "hybrid": (8, 3), "plain": (5, 5)}


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=generator) for name, shape in SHAPES.items()}


def grads_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return {name: torch.randn(*shape, generator=generator) for name, shape in SHAPES.items()}


def built(params: dict[str, nn.Parameter]) -> mp_optim.AdamW:
    return mp_optim.AdamW([*params.items()], lr=1e-2, max_grad_norm=NORM)


def main(folder: Path) -> Any:
    ranks = list(range(2))
    flat: tuple[Placement, ...] = (Shard(0),)
    layouts: dict[str, tuple[DeviceMesh, tuple[Placement, ...]]] = {
        "shard": (DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)), flat),
        "other_shard": (DeviceMesh("cpu", ranks, mesh_dim_names=("ep",)), flat),
        "hybrid": (
            DeviceMesh("cpu", [ranks], mesh_dim_names=("copies", "tp")),
            (Replicate(), Shard(1)),
        ),
    }

    def placed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: distribute_tensor(tensor, *layouts[name]) if name in layouts else tensor
            for name, tensor in tensors.items()
        }

    params = {name: nn.Parameter(tensor) for name, tensor in placed(whole()).items()}
    optimizer = built(params)
    norms, refusal = [], ""
    for step in range(STEPS):
        for name, grad in placed(grads_of(step)).items():
            params[name].grad = grad
        if step == 0:
            try:
                nn.utils.clip_grad_norm_([*params.values()], 1e9)
            except RuntimeError as error:
                refusal = str(error)
        optimizer.step()
        norms.append(optimizer.last_step.grad_norm)
    weights = {
        name: param.detach().full_tensor() if isinstance(param, DTensor) else param.detach()
        for name, param in params.items()
    }
    found = {"norms": norms, "refusal": refusal, "weights": weights}
    return found


if __name__ == "__main__":
    as_rank(main)
