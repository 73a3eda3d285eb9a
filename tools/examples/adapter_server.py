#!/usr/bin/env python
"""Many LoRA adapters over one frozen base: python tools/examples/adapter_server.py

Users join, train, pause and leave in random order. Each adapter has its own learning rate, clipping
limit and state, and one call steps all adapters that have gradients.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from mp_optim import MultiTenantOptimizer, TenantError

WIDTH, RANK = 32, 4


class Adapter(nn.Module):
    """A LoRA update of the base, and the task of its user: another linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter((torch.randn(RANK, WIDTH) / WIDTH**0.5).bfloat16())
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK).bfloat16())
        self.target = torch.randn(WIDTH, RANK) @ torch.randn(RANK, WIDTH) / WIDTH

    def loss(self, base: nn.Linear) -> Tensor:
        x = torch.randn(64, WIDTH).bfloat16()
        given = base(x) + x @ self.down.t() @ self.up.t()
        wanted = base(x).float() + x.float() @ self.target.t()
        return (given.float() - wanted).square().mean()


class Server:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.optimizer = MultiTenantOptimizer(lr=2e-2, weight_decay=0.0, max_grad_norm=1.0)
        self.adapters: dict[str, Adapter] = {}
        self.losses: dict[str, list[float]] = {}
        self.offloaded: set[str] = set()

    def join(self, name: str, lr: float) -> None:
        self.adapters[name], self.losses[name] = Adapter(), []
        self.optimizer.add_tenant(name, self.adapters[name].named_parameters(), lr=lr)

    def train(self, names: list[str]) -> None:
        for name in self.offloaded & set(names):
            self.optimizer.restore_tenant(name)
        self.offloaded -= set(names)
        self.optimizer.zero_grad(names)
        for name in names:
            loss = self.adapters[name].loss(self.base)
            loss.backward()  # type: ignore[no-untyped-call]
            self.losses[name].append(loss.item())
        try:
            self.optimizer.step(names)
        except TenantError as error:  # The other adapters were stepped.
            print(error)
            for name in error.errors:
                self.leave(name)

    def pause(self, name: str) -> None:
        if name not in self.offloaded:
            self.optimizer.offload_tenant(name, self.folder / name)
            self.offloaded.add(name)

    def leave(self, name: str) -> None:
        self.optimizer.remove_tenant(name)
        self.offloaded.discard(name)
        del self.adapters[name]


def main(users: int = 12, rounds: int = 120) -> list[float]:
    """Serve users in random order; returns the mean of their first and of their last losses."""
    torch.manual_seed(0)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(folder)
        for number in range(users):
            server.join(f"user{number}", lr=rng.choice([1e-2, 2e-2]))
        for _ in range(rounds):
            names = rng.sample(list(server.adapters), 6)
            server.train(names)
            server.pause(rng.choice(names))
        server.leave("user0")
        print(f"{len(server.optimizer)} adapters, {len(server.offloaded)} offloaded to the disk")
    trained = server.losses.values()
    return [sum(losses[at] for losses in trained) / users for at in (0, -1)]


if __name__ == "__main__":
    first, last = main()
    print(f"loss {first:.4f} -> {last:.4f}")
