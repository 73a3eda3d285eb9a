#!/usr/bin/env python
"""An RL-style loop that frees the accelerator between phases: python tools/examples/rl_loop.py

Phases take turns: the policy generates, and everything of the optimizer is off the accelerator;
  then it learns.
"""

from __future__ import annotations

import torch
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer


def main(phases: int = 20) -> list[float]:
    """A bandit of four arms by REINFORCE; returns the mean reward of each phase."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    policy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(device, torch.bfloat16)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True, clip_grad=1.0), policy)
    rewards = []
    for _ in range(phases):
        optimizer.offload_to_cpu()  # the rollout has the accelerator's memory to itself
        with torch.no_grad():
            states = torch.randn(256, 8, device=device, dtype=torch.bfloat16)
            actions = torch.distributions.Categorical(logits=policy(states).float()).sample()
            reward = (actions == states[:, :4].argmax(1)).float()
        optimizer.restore_from_cpu()
        optimizer.zero_grad()
        chance = torch.distributions.Categorical(logits=policy(states).float()).log_prob(actions)
        (-(reward - reward.mean()) * chance).mean().backward()
        optimizer.step()
        rewards.append(reward.mean().item())
    return rewards


if __name__ == "__main__":
    rewards = main(60)
    print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
