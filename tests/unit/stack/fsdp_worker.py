"""Two gloo processes train an FSDP2-sharded model; rank 0 writes what one process is compared with."""

import os
import sys

import torch
import torch.distributed as dist
from models import TinyMoE, config_for, is_expert, tokens_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mp_optim import checkpoint, get_megatron_optimizer


def main(rule: str, fraction: float, directory: str) -> None:
    dist.init_process_group("gloo")
    model = TinyMoE(torch.float32)
    fully_shard(model)
    config = config_for("fp32", fraction, optimizer=rule)
    optimizer = get_megatron_optimizer(config, model, expert_predicate=is_expert)
    norms, losses = [], []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(tokens_of(step))
        loss.backward()
        norms.append(optimizer.step().grad_norm)
        losses.append(loss.item())
        if step == 1:
            checkpoint.save(f"{directory}/checkpoint", model, optimizer)
            checkpoint.load(f"{directory}/checkpoint", model, optimizer)
    state = optimizer.state[model.dense]["exp_avg"]
    assert isinstance(state, DTensor) and state.placements == model.dense.placements
    params = {name: p.full_tensor() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"norms": norms, "losses": losses, "params": params}, f"{directory}/result.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own exit


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
