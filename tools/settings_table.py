#!/usr/bin/env python
"""The tables of docs/settings.md: large mixtures of experts on machines of several sizes, then
models that are larger than the machine, with all of the optimizer's state on the host or on a disk.
Prints markdown.

python tools/settings_table.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plan_memory import GIB, load

from mp_optim.apps.fit.model_plan import FORMS, Layout, plan, smallest_fraction, specs_of
from mp_optim.factory.memory_plan import MemoryPlan

MODELS = Path(__file__).parents[1] / "tests" / "functional" / "full_size"


@dataclass(frozen=True)
class Machine:
    """A model and the GPUs that train it.

    Attributes:
        model: name of a file in ``MODELS``.
        layout: how the model is spread.
        gpu: GB of each GPU.
        limit: GiB that parameters, gradients and optimizer may take of it.
    """

    model: str
    layout: Layout
    gpu: int
    limit: int

    def __str__(self) -> str:
        layout = self.layout
        sizes = {"dp": layout.dp, "tp": layout.tp, "ep": layout.ep}
        spread = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        how = "FSDP2" if layout.sharding == "fsdp2" else ""
        return ", ".join(filter(None, (f"{layout.dp * layout.tp} x {self.gpu} GB", spread, how)))

    def plan_of(self, **settings: Any) -> MemoryPlan:
        """Return the plan with settings; by default with the smallest fraction that fits."""
        source, config = load(MODELS / f"{self.model}.yaml")
        specs, config = specs_of(source), replace(config, **settings)
        if "optimizer_offload_fraction" in settings:
            return plan(specs, config, self.layout)
        return smallest_fraction(specs, config, self.layout, gpu_memory=self.limit * GIB)


FITTING = (
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
SMALL = (
    Machine("olmoe_1b_7b", Layout(), 24, 18),
    Machine("qwen3_30b_a3b", Layout(), 80, 60),
    Machine("qwen3_30b_a3b", Layout(dp=2, sharding="fsdp2"), 80, 60),
    Machine("qwen3_235b_a22b", Layout(dp=8, sharding="fsdp2"), 141, 105),
)
_RELEASED = {"offload_mode": "overlap", "release_gradients": True}
_STREAMED = {"offload_place": "streamed"}
_ON_DISK = {**_STREAMED, "optimizer_state_path": "/local"}
WAYS: dict[str, dict[str, Any]] = {
    "host, gradients released": _RELEASED,
    "streamed": _STREAMED,
    "streamed from a disk": _ON_DISK,
    "streamed, gradients released": {**_STREAMED, **_RELEASED},
    "streamed from a disk, gradients released": {**_ON_DISK, **_RELEASED},
}


def main() -> None:
    print("\n".join([*fitting_rows(), "", *small_rows()]))


def fitting_rows() -> Iterator[str]:
    """Yield the lines of the first table."""
    yield _line("model", "machine", *(f"{form}: fraction, GiB on a GPU + host" for form in FORMS))
    yield "|---" * (2 + len(FORMS)) + "|"
    for machine in FITTING:
        cells = []
        for form in FORMS.values():
            found = machine.plan_of(use_distributed_optimizer=machine.layout.dp > 1, **form)
            accelerator, host = found.accelerator.total / GIB, found.host_total / GIB
            cells.append(f"{found.fraction:.2f}, {accelerator:.1f} + {host:.1f}")
        yield _line(machine.model, str(machine), *cells)


def small_rows() -> Iterator[str]:
    """Yield the lines of the second table."""
    yield _line("model", "machine", *WAYS)
    yield "|---" * (2 + len(WAYS)) + "|"
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    for machine in SMALL:
        cells = []
        for way in WAYS.values():
            found = machine.plan_of(**FORMS["8-bit moments, remainders"], **offload, **way)
            places = (found.accelerator.total, found.host_total, found.disk.total)
            cells.append(" + ".join(f"{size / GIB:.1f}" for size in places))
        yield _line(machine.model, str(machine), *cells)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
