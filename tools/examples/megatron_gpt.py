#!/usr/bin/env python
"""Megatron-core's own GPT with experts, on its own parameter attributes: python
tools/examples/megatron_gpt.py"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from mp_optim import OptimizerConfig, get_megatron_optimizer


def build() -> GPTModel:
    """A GPT with four experts a layer, in bf16."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=64,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="allgather",
        moe_grouped_gemm=False,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    return GPTModel(config, spec, vocab_size=32, max_sequence_length=16).bfloat16()


def main(steps: int = 20) -> list[float]:
    """Shrink the weights, whose gradients Megatron's way are in `main_grad`; returns half their sum
    of squares.

    Megatron's forward pass needs CUDA, its parameters and their attributes do not.
    """
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model = build()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2, bf16=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5
        ),
        model,
    )
    print(optimizer.describe())
    losses = []
    for _ in range(steps):
        for param in model.parameters():
            param.main_grad = param.detach().float()
        losses.append(
            sum(0.5 * param.main_grad.square().sum().item() for param in model.parameters())
        )
        optimizer.step()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"half the sum of squares {losses[0]:.1f} -> {losses[-1]:.1f}")
