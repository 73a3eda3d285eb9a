"""Tenants of one optimizer, each compared to the bit with a run of its class alone."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim import SGD, AdamW, Lion, MultiTenantOptimizer
from support.layouts import local
from support.models import same_bits

STEPS = 4
KINDS: tuple[type[Any], ...] = (AdamW, Lion, SGD)


class _Pair:
    """A tenant, and an optimizer alone over copies of its parameters."""

    def __init__(
        self,
        server: MultiTenantOptimizer,
        name: str,
        kind: type[Any],
        values: Mapping[str, Tensor],
        chance: random.Random,
    ) -> None:
        settings = {
            "lr": chance.choice((0.01, 0.3)),
            "weight_decay": chance.choice((0.0, 0.1)),
            "max_grad_norm": chance.choice((None, 0.5)),
            "state": chance.choice(("fp32", "bf16", "8bit")),
            "offload": chance.choice((0.0, 0.0, 1.0)),
        }
        self.shared, self.own = (
            [(key, nn.Parameter(value.detach().clone())) for key, value in values.items()]
            for _ in range(2)
        )
        server.add_tenant(name, self.shared, **settings)
        self.tenant, self.alone = server[name], kind(self.own, **settings)

    def give_grads(self, factor: float) -> None:
        for params in (self.shared, self.own):
            for _, param in params:
                param.grad = (param.detach() * factor).detach()

    def check(self, name: str, result: Any) -> None:
        """Step alone, and raise AssertionError if the tenant's result or bits differ."""
        self.alone.step()
        assert tuple(result) == tuple(self.alone.last_step), (
            f"tenant {name}: {result}, alone {self.alone.last_step}"
        )
        expected = _bits(self.alone, self.own)
        for key, tensor in _bits(self.tenant, self.shared).items():
            assert same_bits(tensor, expected[key]), (
                f"tenant {name}: {key} differs from a run alone"
            )


def _bits(optimizer: Any, params: list[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    found = {f"param {name}": param for name, param in params}
    for name, param in params:
        for key, value in optimizer.state[param].items():
            found[f"{key} of {name}"] = torch.as_tensor(value)
    # Views of bytes need a stride of 1, which a tensor of one element may not have.
    return {key: torch.cat([local(value).flatten()]) for key, value in found.items()}


def compare_with_runs_alone(tenants: Mapping[str, Mapping[str, Tensor]], seed: int) -> None:
    """Train tenants in a random order of steps, offloads and loads.

    Args:
        tenants: initial values of the parameters by name, for each tenant.
        seed: of all choices, equal on all ranks.

    Raises:
        AssertionError: a tenant's step result, parameters or state differ from its run alone.
    """
    chance = random.Random(f"tenants {seed}")
    kind = chance.choice(KINDS)
    server = MultiTenantOptimizer(kind, lr=0.01)
    pairs = {
        name: _Pair(server, name, kind, values, chance)
        for name, values in tenants.items()
        if values
    }
    with tempfile.TemporaryDirectory() as folder:
        for step in range(STEPS):
            for name, pair in pairs.items():
                stays, infinite, way = chance.random() < 0.3, chance.random() < 0.1, chance.random()
                if stays and len(pairs) > 1:
                    continue
                if way < 0.2 and step:
                    server.offload_tenant(name, Path(folder) / name if way < 0.1 else None)
                    server.restore_tenant(name)
                elif way < 0.4 and step:
                    server.load_tenant(name, server.save_tenant(name))
                pair.give_grads(float("inf") if infinite else 0.5 + step)
            stepped = [name for name, pair in pairs.items() if pair.shared[0][1].grad is not None]
            for name, result in server.step(stepped).items():
                pairs[name].check(name, result)
            for pair in pairs.values():
                pair.tenant.zero_grad()
                pair.alone.zero_grad()
