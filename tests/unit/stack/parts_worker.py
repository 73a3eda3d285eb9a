"""Three gloo processes: models of several parts, of whose gradients each rank has others, and ranks that disagree."""

import hashlib
import os
import random
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mp_optim import OptimizerConfig, ProcessGroups, get_megatron_optimizer

RANKS = 3
PROGRAMS = 16
STEPS = 3


class Routed(nn.Module):
    """Layers with an expert each; which experts are used is the caller's choice."""

    def __init__(self, widths: list[int], mixed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(widths))
        self.dense, self.experts = nn.ModuleList(), nn.ModuleList()
        for width in widths:
            self.dense.append(nn.Linear(16, 16, bias=mixed))
            self.experts.append(nn.Linear(16, width, bias=False))
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.3
        if mixed:
            self.experts.bfloat16()

    def forward(self, x: Tensor, used: set[int]) -> Tensor:
        for index, (dense, expert) in enumerate(zip(self.dense, self.experts, strict=True)):
            x = torch.tanh(dense(x))
            if index in used:
                x = x + expert(x.to(expert.weight.dtype)).float().mean(-1, keepdim=True)
        return x.square().mean()


def digest(model: nn.Module) -> str:
    data = b"".join(p.detach().float().contiguous().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()


def program(seed: int, groups: dict[str, dist.ProcessGroup], plain: bool) -> tuple[str, list[float]]:
    """Train a random model; ``plain`` without anything that overlaps or is sharded."""
    chance = random.Random(seed)
    widths = [chance.choice((4, 16, 40)) for _ in range(chance.randint(2, 5))]
    mixed, apart = chance.random() < 0.3, chance.random() < 0.4
    strategy, overlap = chance.choice((("optim", True), ("optim_grads", False), ("optim_grads", True),
                                       ("no_shard", True)))
    settings = {"bucket_size": chance.choice((None, 256, 600)), "overlap_grad_reduce": overlap,
                "data_parallel_sharding_strategy": strategy}
    passes = chance.choice((1, 1, 2))
    if plain:
        settings |= {"overlap_grad_reduce": False, "data_parallel_sharding_strategy": "no_shard"}
    model = Routed(widths, mixed)
    ranks = ProcessGroups(dp=groups["dp"], expert_dp=groups["expert_dp"], expert_grad_stats=groups["alone"]) \
        if apart else ProcessGroups(dp=groups["dp"])
    config = OptimizerConfig(lr=1e-2, use_distributed_optimizer=True, clip_grad=0.0, bf16=mixed, **settings)
    optimizer: Any = get_megatron_optimizer(config, model, process_groups=ranks,
                                            expert_predicate=lambda p, name: name.startswith("experts"))
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(passes):
            mine = random.Random(f"{seed} {step} {turn} {dist.get_rank()}")
            used = {index for index in range(len(widths)) if mine.random() < 0.5}
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(mine.randrange(2**31)))
            with optimizer.no_sync() if turn < passes - 1 else torch.enable_grad():
                if mine.random() < 0.9:  # else this rank has no backward pass at all
                    model(x, used).backward()
        norms.append(optimizer.step().grad_norm)
    return digest(model), norms


def main(directory: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    groups = {"dp": dist.group.WORLD, "expert_dp": dist.new_group(list(range(RANKS))),
              "alone": dist.new_subgroups(1)[0]}
    found: dict[str, Any] = {}
    for seed in range(PROGRAMS):
        found[f"program {seed}"] = [program(seed, groups, plain) for plain in (True, False)]
    torch.save(found, f"{directory}/rank{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own exit


if __name__ == "__main__":
    main(sys.argv[1])
