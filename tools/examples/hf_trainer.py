#!/usr/bin/env python
"""The Hugging Face Trainer with our optimizer and a bf16 model: python tools/examples/hf_trainer.py

The stack clips and keeps FP32 main params, so the Trainer is told not to: `max_grad_norm=0`, no
`bf16=True`.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from mp_optim import OptimizerConfig, get_megatron_optimizer


def main(steps: int = 20) -> list[float]:
    """Learn a repeating row of tokens; returns the losses."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            max_position_embeddings=32,
        )
    ).bfloat16()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2,
            bf16=True,
            clip_grad=1.0,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
        ),
        model,
    )
    row = torch.arange(16) % 8
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row}] * 2 * steps,
            optimizers=(optimizer, None),
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
