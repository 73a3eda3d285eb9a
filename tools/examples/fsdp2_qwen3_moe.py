#!/usr/bin/env python
"""FSDP2 and a Hugging Face mixture of experts, which no rank ever holds whole.

torchrun --standalone --nproc-per-node 2 tools/examples/fsdp2_qwen3_moe.py Qwen/Qwen3-30B-A3B 1e-5
torchrun ... --nproc-per-node 8 tools/examples/fsdp2_qwen3_moe.py Qwen/Qwen3-235B-A22B 1e-5 DISK

The model is a folder or a name as from_pretrained takes it; without one it is a tiny one. DISK: a
folder for the optimizer's state.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

import mp_optim

ON_HOST = {
    **{"state": "8bit", "main_params": "remainder16"},
    **{"offload": 1.0, "offload_place": "streamed"},
}
ON_DISK = {**ON_HOST, "offload_mode": "overlap", "release_gradients": True}
TINY = Qwen3MoeConfig(
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
)


def sharded(name: str, device: torch.device) -> Any:
    """The model, of which rank 0 reads the weights and sends each rank its part."""
    config: Any = AutoConfig.from_pretrained(name) if name else TINY
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    weights = {}
    if dist.get_rank() == 0:
        made: Any = AutoModelForCausalLM
        whole = (
            made.from_pretrained(name, dtype=torch.bfloat16)
            if name
            else made.from_config(config, dtype=torch.bfloat16)
        )
        weights = whole.state_dict()
        for key, buffer in model.named_buffers():  # of rotary embeddings: in no state dict
            buffer.copy_(whole.get_buffer(key))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    return model


def main(name: str = "", lr: str = "1e-2", disk: str = "", steps: int = 20) -> list[float]:
    """Learn a repeating row of tokens; returns this rank's losses."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group()
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_rank() % torch.accelerator.device_count())
    torch.manual_seed(0)
    model = sharded(name, device)
    settings: dict[str, Any] = {**ON_DISK, "optimizer_state_path": disk} if disk else ON_HOST
    named = model.named_parameters()
    optimizer = mp_optim.AdamW(named, lr=float(lr), max_grad_norm=1.0, **settings)
    row = (torch.arange(32, device=device).reshape(2, 16) + dist.get_rank()) % 8
    losses = []
    for _ in range(steps):
        loss = model(input_ids=row, labels=row, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(optimizer.describe())
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
