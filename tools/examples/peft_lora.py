#!/usr/bin/env python
"""LoRA adapters over a frozen bf16 base, by peft: python tools/examples/peft_lora.py

What is frozen costs the optimizer nothing: main params and moments exist for the adapters alone.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from mp_optim import OptimizerConfig, get_megatron_optimizer


def main(steps: int = 30) -> list[float]:
    """Learn a repeating row of tokens; returns the losses."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    ).bfloat16()
    model = get_peft_model(
        base,
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]),
        autocast_adapter_dtype=False,
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=2e-2, bf16=True, weight_decay=0.0), model)
    print(optimizer.describe())
    row = torch.arange(16)[None] % 8
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
