"""Four gloo processes: data-parallel training with everything shared out, something, or nothing.

The first 2, 3 or all 4 ranks form the data-parallel group of a case; each rank sees other data.
"""

import dataclasses
import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from models import DTYPES, config_for, is_expert
from torch import Tensor, nn

from mp_optim import MegatronOptimizer, ProcessGroups, get_megatron_optimizer

STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "no_shard": {}, "optim": {}, "optim_grads": {},
    "optim-overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "optim_grads-overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "no_shard-overlap": {"overlap_grad_reduce": True},
    "optim-whole": {"use_layer_wise_distributed_optimizer": True, "bucket_size": None},
}


@dataclasses.dataclass(frozen=True)
class Case:
    ranks: int
    precision: str
    layout: str
    fraction: float = 0.0
    rule: str = "adam"
    microbatches: int = 1
    fp32_reduce: bool = True


class SmallMoE(nn.Module):
    """Parameters that straddle shards, an empty one, one that nobody uses, one that only odd ranks use, a tied one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(*shape, generator=generator) * 0.2).to(dtype))

        self.embed = nn.Embedding.from_pretrained(weight(50, 24).data, freeze=False)
        self.dense = nn.Linear(24, 24, dtype=dtype)
        self.dense.weight.data, self.dense.bias.data = weight(24, 24).data, weight(24).data
        self.norm = nn.LayerNorm(24)  # FP32 in a 16-bit model
        self.odd = weight(24)
        self.unused = weight(300)
        self.empty = nn.Parameter(torch.zeros(0, 8, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(24, dtype=dtype), requires_grad=False)
        self.experts = nn.ParameterDict({"up": weight(2, 24, 40), "down": weight(2, 40, 24)})
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, odd: bool) -> Tensor:
        hidden = torch.tanh(self.dense(self.embed(tokens))) * self.frozen
        hidden = self.norm(hidden.float()).to(hidden.dtype)
        if odd:
            hidden = hidden + self.odd
        hidden = hidden + sum(torch.tanh(hidden @ self.experts["up"][e]) @ self.experts["down"][e] for e in range(2))
        return nn.functional.cross_entropy(self.head(hidden).float()[:-1], tokens[1:])


def tokens_of(step: int, rank: int, part: int) -> Tensor:
    return torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(step * 100 + rank * 10 + part))


def build(case: Case, group: dist.ProcessGroup, **more: Any) -> tuple[SmallMoE, MegatronOptimizer]:
    model = SmallMoE(DTYPES[case.precision.split("-")[0]])
    settings = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": case.layout.split("-")[0],
                "bucket_size": 1500, "optimizer": case.rule, "grad_reduce_in_fp32": case.fp32_reduce,
                **SETTINGS[case.layout], **more}
    config = config_for(case.precision, case.fraction, **settings)
    return model, get_megatron_optimizer(config, model, expert_predicate=is_expert,
                                         process_groups=ProcessGroups(dp=group))


def train(model: SmallMoE, optimizer: Any, case: Case, rank: int, steps: range = range(STEPS)) -> dict[str, Any]:
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        for part in range(case.microbatches):
            last = part == case.microbatches - 1
            with optimizer.no_sync() if not last else torch.enable_grad():
                loss = model(tokens_of(step, rank, part), rank % 2 == 1)
                optimizer.scale_loss(loss).backward()
                losses.append(loss.item())
        norms.append(optimizer.step().grad_norm)
    optimizer.finish_param_sync()
    return {"losses": losses, "norms": norms, "params": digest(model.state_dict())}


def digest(tensors: dict[str, Tensor]) -> str:
    data = b"".join(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    for _, value in sorted(tensors.items()))
    return hashlib.sha256(data).hexdigest()


def cases() -> list[Case]:
    found = []
    for ranks in (2, 3, 4):
        for precision in ("bf16", "fp16"):
            for layout in SETTINGS:
                found += [Case(ranks, precision, layout, fraction) for fraction in
                          ((0.0, 0.5, 1.0) if "-" not in layout or ranks == 3 else (0.0,))]
            found += [Case(ranks, precision, layout, microbatches=2) for layout in SETTINGS]
        found += [Case(ranks, "bf16", layout, 0.5, fp32_reduce=False) for layout in SETTINGS]
        found += [Case(ranks, "fp32", layout, 0.0) for layout in SETTINGS]
        found += [Case(ranks, "bf16", layout, fraction, rule="lamb") for layout in ("no_shard", "optim", "optim_grads")
                  for fraction in (0.0, 0.5)]
        found += [Case(ranks, compact, layout, 0.5) for layout in ("no_shard", "optim", "optim_grads")
                  for compact in ("bf16-8bit", "bf16-stochastic", "bf16-remainder")]
    return found


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (2, 3, 4)}
    results: dict[str, Any] = {}
    for case in cases():
        if rank < case.ranks:
            results[repr(case)] = train(*build(case, groups[case.ranks]), case, rank)
    torch.save(results, f"{directory}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own exit


if __name__ == "__main__":
    main(sys.argv[1])
