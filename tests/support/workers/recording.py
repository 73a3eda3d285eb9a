"""Two gloo processes with ZeRO record steps. In the record "flipped", rank 1 flips a bit of its
gradients."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mp_optim
from support.as_rank import as_rank


def main(folder: Path) -> list[str]:
    for name, strategy in (("equal", "optim"), ("second", "optim_grads"), ("flipped", "optim")):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 24)).bfloat16()
        config = mp_optim.OptimizerConfig(
            bf16=True,
            lr=1e-2,
            clip_grad=0.1,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy=strategy,
            use_precision_aware_optimizer=True,
            exp_avg_dtype="uint8",
            exp_avg_sq_dtype="uint8",
        )
        optimizer = mp_optim.get_megatron_optimizer(config, model)
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            (model(inputs) * (dist.get_rank() + 1)).pow(2).mean().backward()
            if step < 2:
                optimizer.step()
        with mp_optim.record_step(optimizer, folder / name):
            if name == "flipped" and dist.get_rank() == 1:
                grad = next(grad for _, grad in optimizer.named_gradients() if grad.numel())
                grad.view(torch.int16).view(-1)[-1] ^= 1 << 13
            optimizer.step()
    return []


if __name__ == "__main__":
    as_rank(main)
