#!/usr/bin/env python
"""docs/images/memory.png: what training takes on the accelerator and on the host, by settings. They
are plans, made of sizes alone.

python tools/draw_memory.py [FOLDER]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from mp_optim import plan
from mp_optim.apps.fit.model_plan import specs_of
from mp_optim.apps.fit.plan_command import FORMS, GIB
from mp_optim.factory.memory_plan import MemoryPlan
from training.loading import load_yaml
from training.models import hf_config

MODELS = Path(__file__).parents[1] / "tests" / "functional" / "full_size"
IMAGES = Path(__file__).parents[1] / "docs" / "images"

MODEL = "olmoe_1b_7b"
FP32, BF16, EIGHT_BITS = FORMS.values()
SETTINGS: dict[str, dict[str, Any]] = {
    "FP32 main params and moments": FP32,
    "bf16 moments, 16-bit remainders": BF16,
    "8-bit moments, 16-bit remainders": EIGHT_BITS,
    "FP32, half on the host": {**FP32, "optimizer_offload_fraction": 0.5},
    "FP32, all on the host": {**FP32, "optimizer_offload_fraction": 1.0},
    "the same, gradients released in backward": {
        **FP32,
        "optimizer_offload_fraction": 1.0,
        "offload_mode": "overlap",
        "release_gradients": True,
    },
}
"""What is said of each bar, and its settings."""

SHADES = {
    "parameters": "#08519c",
    "gradients": "#6baed6",
    "optimizer": "#fd8d3c",
    "on the host": "#d9d9d9",
}


def main(folder: Path = IMAGES) -> None:
    source = load_yaml(MODELS / f"{MODEL}.yaml")
    specs = specs_of(hf_config(source.model))
    plans = {}
    for name, form in SETTINGS.items():
        offloads = form.get("optimizer_offload_fraction", 0.0) > 0.0
        plans[name] = plan(specs, replace(source.optimizer, **form, optimizer_cpu_offload=offloads))
    draw(plans, folder / "memory.png")


def parts(rank: MemoryPlan) -> dict[str, float]:
    device = rank.accelerator
    optimizer = device.total - device.model_params - device.grads
    values = (device.model_params, device.grads, optimizer, rank.host_total)
    return {name: value / GIB for name, value in zip(SHADES, values, strict=True)}


def draw(plans: dict[str, MemoryPlan], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(plans) + 1.6), dpi=150)
    for place, rank in enumerate(plans.values()):
        start = 0.0
        for name, size in parts(rank).items():
            axes.barh(place, size, left=start, color=SHADES[name], height=0.7)
            if size >= 4.0:
                color = "white" if name == "parameters" else "black"
                middle = start + size / 2
                axes.text(middle, place, f"{size:.0f}", ha="center", va="center", color=color)
            start += size
    axes.set_yticks(range(len(plans)), list(plans))
    axes.invert_yaxis()
    count = next(iter(plans.values())).params
    axes.set_title(
        f"{MODEL}, {count / 1e9:.1f} B parameters in bf16, AdamW", loc="left", fontsize=10
    )
    axes.set_xlabel("GiB, without activations")
    axes.legend(
        [plt.Rectangle((0, 0), 1, 1, color=shade) for shade in SHADES.values()],
        [name if name == "on the host" else f"{name} on the GPU" for name in SHADES],
        ncols=2,
        loc="upper center",
        bbox_to_anchor=(0.3, -0.16),
        fontsize=8,
        frameon=False,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
