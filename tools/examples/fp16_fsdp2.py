#!/usr/bin/env python
"""Reinforcement learning in float16 under FSDP2, with either loss scale.

torchrun --standalone --nproc-per-node 2 tools/examples/fp16_fsdp2.py ours
torchrun --standalone --nproc-per-node 2 tools/examples/fp16_fsdp2.py torch

Group-relative policy gradients, clipped. The first loss scale is far too large, so some steps are
skipped, by all ranks or by none. In the middle everything is saved; a second run goes on from
there, with the same bits.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mp_optim
from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer

PROMPTS, ANSWERS, WORDS = 8, 16, 12
CLIP, FIRST_SCALE = 0.5, 2.0**24


class Policy(nn.Module):
    """Chooses a word for a prompt."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prompt, self.hidden = nn.Embedding(PROMPTS, 32), nn.Linear(32, 64)
        self.head = nn.Linear(64, WORDS)

    def forward(self, prompts: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.prompt(prompts)))).float()


class Run:
    """A sharded policy in float16, its optimizer, and who scales its loss."""

    def __init__(self, scaling: str) -> None:
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        self.model = Policy().to(self.device, torch.float16)
        # gradients are added up over ranks in FP32: their sum in float16 could overflow
        fully_shard(self.model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        self.scaler = None
        if scaling == "torch":
            named = self.model.named_parameters()
            self.optimizer = mp_optim.AdamW(named, lr=1e-2, offload=0.5, max_grad_norm=CLIP)
            self.scaler = torch.amp.GradScaler(
                self.device.type, init_scale=FIRST_SCALE, growth_interval=8
            )
        else:
            config = OptimizerConfig(
                lr=1e-2,
                fp16=True,
                initial_loss_scale=FIRST_SCALE,
                loss_scale_window=8,
                hysteresis=1,
                clip_grad=CLIP,
                optimizer_cpu_offload=True,
                optimizer_offload_fraction=0.5,
            )
            self.optimizer = get_megatron_optimizer(config, self.model)

    def step(self, number: int) -> tuple[float, bool]:
        """One step; this rank's mean reward, and whether it was skipped."""
        generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
        prompts = torch.arange(PROMPTS, device=self.device)[:, None].expand(PROMPTS, ANSWERS)
        logits = self.model(prompts)
        chances = logits.detach().softmax(-1).flatten(0, 1).cpu()
        words = torch.multinomial(chances, 1, generator=generator).view(PROMPTS, ANSWERS)
        words = words.to(self.device)
        rewards = (words == prompts).float()
        advantages = rewards - rewards.mean(1, keepdim=True)
        log_chances = torch.distributions.Categorical(logits=logits).log_prob(words)
        loss = -(advantages * log_chances).mean()
        self.optimizer.zero_grad()
        if self.scaler is None:
            self.optimizer.scale_loss(loss).backward()
            taken = self.optimizer.step().success
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            taken = self.optimizer.last_step.success
        return rewards.mean().item(), not taken

    def save(self, folder: str) -> None:
        extra = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        checkpoint.save(folder, self.model, self.optimizer, extra=extra)

    def load(self, folder: str) -> None:
        extra = checkpoint.load(folder, self.model, self.optimizer)
        if self.scaler is not None:
            self.scaler.load_state_dict(extra["scaler"])


def main(scaling: str, steps: int = 60) -> None:
    dist.init_process_group()
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    whole, half = Run(scaling), steps // 2
    rewards, skipped = [], 0
    for number in range(steps):
        if number == half:
            whole.save(folders[0])
        reward, was_skipped = whole.step(number)
        rewards.append(reward)
        skipped += was_skipped
    again = Run(scaling)
    again.load(folders[0])
    assert [again.step(number)[0] for number in range(half, steps)] == rewards[half:]
    for mine, theirs in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, skipped)
    assert len(set(counts)) == 1
    if dist.get_rank() == 0:
        print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}, skipped {skipped} of {steps} steps")
        print("resumed to the bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
