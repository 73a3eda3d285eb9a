"""Three gloo processes write outside of a step, and one of them writes differently."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mp_optim import MegatronOptimizer, OptimizerConfig, ProcessGroups, get_megatron_optimizer
from mp_optim.process_groups.missing_ranks import MissingRanksError
from support.as_rank import as_rank

RANKS, ODD = 3, 1
OTHERWISE = ["nothing", "factors", "one factor", "name", "unknown", "values"]
CASES = [("optim", what) for what in OTHERWISE]
CASES += [(layout, what) for layout in ("fsdp2", "tp") for what in ("nothing", "one factor")]
ALONE = {
    "scale_rows_": "comparing the arguments of scale_rows_",
    "averaged_weights": "gathering parameters",
}
"""Calls that one rank makes alone, with the collective that the error names."""


def built(layout: str, group: Any = None) -> tuple[nn.Module, MegatronOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 12, bias=False).bfloat16()
    config = OptimizerConfig(lr=1e-2, bf16=True, ema_decay=0.5)
    groups = None
    if layout in ("no_shard", "optim"):
        config.use_distributed_optimizer = True
        config.data_parallel_sharding_strategy = layout
        groups = ProcessGroups(dp=group)
    elif layout == "tp":
        groups = ProcessGroups(tp=dist.group.WORLD, grad_stats=dist.group.WORLD)
    else:
        fully_shard(model)
    optimizer = get_megatron_optimizer(config, model, process_groups=groups)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8).bfloat16()).float().square().mean().backward()
    optimizer.step()


def whole(model: nn.Module) -> list[float]:
    weight = model.weight.detach()
    full = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return full.float().flatten().tolist()


def told_by(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        again = " (and again)" if isinstance(_first_of(error), MissingRanksError) else ""
        return f"{type(error).__name__}: {error}{again}"
    return "no error"


def _first_of(error: BaseException) -> BaseException | None:
    cause = error.__cause__
    return None if cause is None else cause.__context__


def write(layout: str, what: str) -> dict[str, Any]:
    """Return this rank's error, and its weights before, after, and after one more step."""
    model, optimizer = built(layout)
    odd = dist.get_rank() == ODD
    values = torch.arange(96.0).view(12, 8) / 50
    factors = {"weight": torch.full((12,), 0.5)}
    if odd and what == "factors":
        factors["weight"] = factors["weight"] * 1.5
    if odd and what == "one factor":
        factors["weight"][7] = 0.25
    if odd and what == "name":
        factors = {}
    if odd and what == "unknown":
        factors["wieght"] = factors["weight"]
    if odd and what == "values":
        values[3, 3] = 9.0
    before = whole(model)
    if what == "values":
        told = told_by(lambda: optimizer.reload_model_params({"weight": values}))
    else:
        told = told_by(lambda: optimizer.scale_rows_(factors))
    found = {"told": told, "before": before, "after": whole(model)}
    step(model, optimizer)
    return {**found, "stepped": whole(model)}


def alone(what: str) -> str:
    impatient = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=3))
    sharded = what == "averaged_weights"
    model, optimizer = built("optim" if sharded else "no_shard", impatient)

    def go() -> None:
        if dist.get_rank() == ODD and what == "scale_rows_":
            optimizer.scale_rows_({"weight": torch.full((12,), 0.5)})
        if dist.get_rank() == ODD and what == "averaged_weights":
            with optimizer.averaged_weights():
                pass
        step(model, optimizer)

    return told_by(go)


def main(folder: Path) -> Any:
    found: dict[str, Any] = {f"{layout} {what}": write(layout, what) for layout, what in CASES}
    for what in ALONE:
        found[what] = alone(what)
    return found


if __name__ == "__main__":
    as_rank(main)
