#!/usr/bin/env python
"""The table of docs/settings.md: large mixtures of experts on machines of several sizes. Prints
markdown.

python tools/settings_table.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plan_memory import GIB, load

from mp_optim import OptimizerConfig
from mp_optim.apps.fit.model_plan import FORMS, Layout, smallest_fraction, specs_of
from mp_optim.factory.memory_plan import MemoryPlan

MODELS = Path(__file__).parents[1] / "tests" / "functional" / "full_size"


@dataclass(frozen=True)
class Machine:
    """A model and where it is trained. ``limit`` is what parameters, gradients and optimizer may
    take, in GiB."""

    model: str
    layout: Layout
    gpu: int
    limit: int

    def __str__(self) -> str:
        ranks = self.layout.dp * self.layout.tp
        sizes = [
            f"{name} {size}"
            for name in ("dp", "tp", "ep")
            if (size := getattr(self.layout, name)) > 1
        ]
        return f"{ranks} x {self.gpu} GB" + (f", {' '.join(sizes)}" if sizes else "")


MACHINES = (
    Machine("olmoe_1b_7b", Layout(), 80, 60),
    Machine("olmoe_1b_7b", Layout(dp=4, ep=4), 40, 30),
    Machine("olmoe_1b_7b", Layout(dp=8, ep=8), 24, 18),
    Machine("qwen3_30b_a3b", Layout(dp=8, ep=8), 40, 30),
    Machine("qwen3_30b_a3b", Layout(dp=8, ep=8), 80, 60),
    Machine("qwen3_30b_a3b", Layout(dp=16, ep=8), 80, 60),
    Machine("mixtral_8x7b", Layout(dp=8, ep=8), 80, 60),
    Machine("mixtral_8x7b", Layout(dp=8, ep=8), 141, 105),
    Machine("deepseek_v3", Layout(dp=16, tp=8, ep=16), 80, 60),
    Machine("deepseek_v3", Layout(dp=32, tp=8, ep=32), 80, 60),
)


def main() -> None:
    print("\n".join(rows()))


def rows() -> Iterator[str]:
    """The table's lines."""
    yield (
        "| model | machine | "
        + " | ".join(f"{form}: fraction, GiB on a GPU + host" for form in FORMS)
        + " |"
    )
    yield "|---" * (2 + len(FORMS)) + "|"
    for machine in MACHINES:
        source, config = load(MODELS / f"{machine.model}.yaml")
        specs = specs_of(source)
        settings = {spec.name: getattr(config, spec.name) for spec in dataclasses.fields(config)}
        settings["use_distributed_optimizer"] = machine.layout.dp > 1
        cells = [
            _cell(
                smallest_fraction(
                    specs,
                    OptimizerConfig(**{**settings, **form}),
                    machine.layout,
                    gpu_memory=machine.limit * GIB,
                )
            )
            for form in FORMS.values()
        ]
        yield f"| {machine.model} | {machine} | " + " | ".join(cells) + " |"


def _cell(found: MemoryPlan) -> str:
    accelerator, host = found.accelerator.total / GIB, found.host_total / GIB
    return f"{found.fraction:.2f}, {accelerator:.1f} + {host:.1f}"


if __name__ == "__main__":
    main()
