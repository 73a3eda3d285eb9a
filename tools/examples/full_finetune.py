#!/usr/bin/env python
"""All parameters of a language model are trained on one GPU; its optimizer is elsewhere.

python tools/examples/full_finetune.py 24GB path/to/model /mnt/nvme
python tools/examples/full_finetune.py 16GB path/to/model

The model is a folder or a name as from_pretrained takes it; without one it is a tiny Llama.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import mp_optim

AWAY: dict[str, Any] = {
    **{"state": "8bit", "offload": 1.0, "offload_place": "streamed"},
    **{"offload_mode": "overlap", "release_gradients": True},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "24GB": {"main_params": "remainder16", **AWAY},
    "16GB": {"main_params": "none", **AWAY},
}
TINY = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)


def batches(model: Any, steps: int) -> Iterator[Tensor]:
    """Rows of tokens: yours. Here one row that repeats itself."""
    for _ in range(steps):
        yield torch.arange(64, device=model.device).view(1, 64) % 16


def main(
    machine: str, name: str = "", disk: str = "", lr: float = 1e-5, steps: int = 100
) -> list[float]:
    """Train; returns the losses."""
    torch.manual_seed(0)
    if name:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_config(TINY, dtype=torch.bfloat16)
    model.to(torch.accelerator.current_accelerator() or "cpu").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    settings = SETTINGS[machine] | ({"optimizer_state_path": disk} if disk else {})
    optimizer = mp_optim.AdamW(model.named_parameters(), lr=lr, max_grad_norm=1.0, **settings)
    print(optimizer.describe())
    losses = []
    for tokens in batches(model, steps):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main(*sys.argv[1:])
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
