"""Train many small tenants of one optimizer, and compare each to the bit with a run of its class
alone.

The calls have a random order. In each step, hyperparameters of some tenants are out of range, so
that these tenants fail.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim import SGD, AdamW, Lion, MultiTenantOptimizer, TenantError
from support.layouts import local
from support.models import same_bits

STEPS = 4
FAILING = 0.05
"""Probability that a tenant fails in a step."""
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

    def step_alone(self, name: str, result: Any) -> None:
        """Raise AssertionError if a step alone has another result than the tenant's step."""
        self.alone.step()
        assert tuple(result) == tuple(self.alone.last_step), (
            f"tenant {name}: {result}, alone {self.alone.last_step}"
        )

    def compare(self, name: str) -> None:
        """Raise AssertionError if the tenant's bits differ from those of the optimizer alone."""
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


def compare_with_runs_alone(
    tenants: Mapping[str, Mapping[str, Tensor]], seed: int, steps: int = STEPS
) -> None:
    """Train tenants in a random order of steps, offloads, loads and failures.

    Args:
        tenants: initial values of the parameters by name, for each tenant.
        seed: of all choices, equal on all ranks.
        steps: number of steps.

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
        for step in range(steps):
            stepped = []
            for name in chance.sample(list(pairs), len(pairs)):
                stays, infinite, way = chance.random() < 0.3, chance.random() < 0.1, chance.random()
                if stays and len(pairs) > 1:
                    continue
                if way < 0.2 and step:
                    server.offload_tenant(name, Path(folder) / name if way < 0.1 else None)
                    server.restore_tenant(name)
                elif way < 0.4 and step:
                    server.load_tenant(name, server.save_tenant(name))
                pairs[name].give_grads(float("inf") if infinite else 0.5 + step)
                stepped.append(name)
            failing = {name for name in stepped if chance.random() < FAILING}
            for name, result in _step(server, stepped, failing).items():
                pairs[name].step_alone(name, result)
            for name, pair in pairs.items():
                pair.compare(name)
                pair.tenant.zero_grad()
                pair.alone.zero_grad()


def _step(server: MultiTenantOptimizer, names: list[str], failing: set[str]) -> dict[str, Any]:
    """Step tenants, and return the results of the tenants that do not fail."""
    groups = {name: server[name].param_groups[0] for name in failing}
    rates = {name: group["lr"] for name, group in groups.items()}
    for group in groups.values():
        group["lr"] = -1.0
    try:
        results = server.step(names)
        assert not failing, f"tenants {failing} did not fail"
    except TenantError as error:
        assert error.errors.keys() == failing, f"{failing} should fail: {error}"
        results = error.results
    for name, group in groups.items():
        group["lr"] = rates[name]
    assert results.keys() == set(names) - failing
    return results


# -- command ---------------------------------------------------------------------------------------


@dataclass
class Options:
    """Options of the command."""

    count: int = 1000
    """Number of tenants."""
    steps: int = STEPS
    """Number of steps."""
    seed: int = 0
    """Seed of shapes, values and choices."""


def main(options: Options) -> int:
    """Train drawn tenants, and return the exit status."""
    logging.getLogger("mp_optim").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")  # of skipped steps
    began = time.process_time()
    compare_with_runs_alone(drawn(options.count, options.seed), options.seed, options.steps)
    seconds = time.process_time() - began
    print(
        f"{options.count} tenants, {options.steps} steps: all bits are those of runs alone "
        f"({seconds:.0f} s of CPU time)"
    )
    return 0


def drawn(count: int, seed: int) -> dict[str, dict[str, Tensor]]:
    """Return small LoRA adapters with random shapes and dtypes, by name."""
    chance, source = random.Random(f"adapters {seed}"), torch.Generator().manual_seed(seed)
    found: dict[str, dict[str, Tensor]] = {}
    for number in range(count):
        rank, width = chance.choice((1, 2, 4)), chance.choice((3, 8, 40))
        dtype = chance.choice((torch.bfloat16, torch.float32))
        shapes = {"down": (rank, width), "up": (width, rank)}
        found[f"adapter {number}"] = {
            name: torch.randn(shape, generator=source).to(dtype) for name, shape in shapes.items()
        }
    return found
