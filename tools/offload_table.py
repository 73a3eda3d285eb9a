#!/usr/bin/env python
"""The second table of docs/settings.md: models that are larger than the machine, with all of the
optimizer's state on the host or on a disk. Prints markdown.

python tools/offload_table.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from plan_memory import GIB, load
from settings_table import MODELS, Machine

from mp_optim import OptimizerConfig
from mp_optim.apps.fit.model_plan import FORMS, Layout, plan, specs_of
from mp_optim.factory.memory_plan import MemoryPlan

FORM = "8-bit moments, remainders"
WAYS: dict[str, dict[str, Any]] = {
    "host, gradients released": {"offload_mode": "overlap", "release_gradients": True},
    "streamed": {"offload_place": "streamed"},
    "streamed from a disk": {"offload_place": "streamed", "optimizer_state_path": "/local"},
}
_RELEASED = WAYS["host, gradients released"]
WAYS |= {
    f"{name}, gradients released": {**way, **_RELEASED}
    for name, way in WAYS.items()
    if way.get("offload_place") == "streamed"
}
MACHINES = (
    Machine("olmoe_1b_7b", Layout(), 24, 18),
    Machine("qwen3_30b_a3b", Layout(), 80, 60),
    Machine("qwen3_30b_a3b", Layout(dp=2, sharding="fsdp2"), 80, 60),
    Machine("qwen3_235b_a22b", Layout(dp=8, sharding="fsdp2"), 141, 105),
)


def main() -> None:
    print("\n".join(rows()))


def rows() -> Iterator[str]:
    """The table's lines."""
    yield f"| model | machine | {' | '.join(WAYS)} |"
    yield "|---" * (2 + len(WAYS)) + "|"
    for machine in MACHINES:
        cells = [_cell(machine, way) for way in WAYS.values()]
        how = ", FSDP2" if machine.layout.sharding == "fsdp2" else ""
        yield f"| {machine.model} | {machine}{how} | {' | '.join(cells)} |"


def _cell(machine: Machine, way: Mapping[str, Any]) -> str:
    planned = _planned(machine, way)
    places = (planned.accelerator.total, planned.host_total, planned.disk.total)
    return " + ".join(f"{size / GIB:.1f}" for size in places)


def _planned(machine: Machine, way: Mapping[str, Any]) -> MemoryPlan:
    source, config = load(MODELS / f"{machine.model}.yaml")
    fields = dataclasses.fields(config)
    settings = {spec.name: getattr(config, spec.name) for spec in fields}
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    chosen = OptimizerConfig(**{**settings, **FORMS[FORM], **offload, **way})
    return plan(specs_of(source), chosen, machine.layout)


if __name__ == "__main__":
    main()
