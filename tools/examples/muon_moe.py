#!/usr/bin/env python
"""Muon for a mixture of experts: FSDP2 over data-parallel ranks, experts spread over others.

torchrun --standalone --nproc-per-node 4 tools/examples/muon_moe.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import mp_optim

WIDTH, INSIDE, EXPERTS = 32, 64, 4
POLICY = MixedPrecisionPolicy(reduce_dtype=torch.float32)


class Experts(nn.Module):
    """Stacks of matrices, of which each rank of a mesh dimension has some."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        up = torch.randn(EXPERTS, WIDTH, INSIDE) / WIDTH**0.5
        down = torch.randn(EXPERTS, INSIDE, WIDTH) / INSIDE**0.5
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(0)]))

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Args: tokens: of this rank. weights: of each token for each expert."""
        group = self.mesh.get_group()
        tokens = all_gather_tensor_autograd(tokens, 0, group)
        weights = all_gather_tensor_autograd(weights, 0, group)
        up, down = self.up.to_local(), self.down.to_local()
        mine = weights.tensor_split(self.mesh.size(), 1)[self.mesh.get_local_rank()]
        hidden = torch.einsum("td,edh->eth", tokens, up).relu()
        results = torch.einsum("eth,ehd,te->td", hidden, down, mine.contiguous())
        return reduce_scatter_tensor_autograd(results, "sum", 0, group)


class Model(nn.Module):
    """Predicts the next of some tokens."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.mix, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.head = Experts(mesh), nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.embedding(tokens)
        value = value + self.mix(value)
        weights, chosen = self.router(value).softmax(-1).topk(2)
        weights = torch.zeros(len(tokens), EXPERTS, dtype=value.dtype).scatter(1, chosen, weights)
        return self.head(value + self.experts(value, weights))


def main(steps: int = 40) -> None:
    dist.init_process_group()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    model = Model(mesh["ep"]).bfloat16()
    fully_shard(model.experts, mesh=mesh["dp"], mp_policy=POLICY)
    # a token comes to an expert from every rank: gradients are averaged over all of them
    model.experts.set_gradient_divide_factor(dist.get_world_size())
    model.experts.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums
    fully_shard(model, mesh=mesh._flatten("all"), mp_policy=POLICY)
    optimizer = mp_optim.Muon(
        model.named_parameters(),
        lr=1e-2,
        adjust_lr_fn="match_rms_adamw",
        max_grad_norm=1.0,
        offload=0.5,
    )
    losses = []
    for step in range(steps):
        random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(16, (64,), generator=random)
        loss = nn.functional.cross_entropy(model(tokens).float(), (5 * tokens + 3) % 16)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(optimizer.describe())
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
