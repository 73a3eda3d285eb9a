#!/usr/bin/env python
"""The Hugging Face Trainer builds our optimizer itself: python tools/examples/hf_trainer_class.py

With resume=True it goes on from the checkpoint in the middle, with the same losses. The Trainer
clips, as always; its groups, without decay for biases and norms, are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mp_optim

SIZES = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)


def main(
    folder: str = "runs/hf", cls: Any = mp_optim.AdamW, resume: bool = False, **settings: Any
) -> list[float]:
    """Learn repeating tokens for 60 steps; returns the losses."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SIZES).bfloat16()
    row = torch.arange(16) % 8
    trainer = Trainer(
        model,
        TrainingArguments(
            folder, max_steps=60, save_steps=30, logging_steps=1, report_to=[], use_cpu=True
        ),
        train_dataset=[{"input_ids": row + n % 50, "labels": row + n % 50} for n in range(480)],
        optimizer_cls_and_kwargs=(cls, {"lr": 3e-3, **settings}),
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-30" if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main(offload=1.0, state="8bit")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
