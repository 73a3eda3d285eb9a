#!/usr/bin/env python
"""FSDP2 and a Hugging Face Qwen3-MoE: torchrun --standalone --nproc-per-node 2
tools/examples/fsdp2_qwen3_moe.py"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mp_optim import OptimizerConfig, get_megatron_optimizer


def main(steps: int = 20) -> list[float]:
    """Learn a repeating row of tokens; returns this rank's losses."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
        )
    ).to(device, torch.bfloat16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2,
            bf16=True,
            clip_grad=1.0,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=0.5,
        ),
        model,
    )
    row = (torch.arange(32, device=device).reshape(2, 16) + dist.get_rank()) % 8
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
