#!/usr/bin/env python
"""Models that mp-optim fit ships on four machines: the table of docs/fit.md. Prints Markdown.

python tools/fit_table.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tyro

from mp_optim.apps.fit import command as fit
from mp_optim.apps.fit.command import GIB

MACHINES = {
    "24 GB, host 64 GB, disk 1 TB": "--gpu 24GB --ram 64GB --disk 1TB",
    "80 GB, host 256 GB": "--gpu 80GB --ram 256GB",
    "2 x 80 GB, host 512 GB, disk 4 TB": "--gpu 80GB --gpus 2 --ram 512GB --disk 4TB",
    "8 x 141 GB, host 2 TB, disk 30 TB": "--gpu 141GB --gpus 8 --ram 2TB --disk 30TB",
}


MODELS = (
    "Llama-3.2-1B",
    "Llama-3.1-8B",
    "Llama-3.1-70B",
    "Mistral-Small-24B-Base-2501",
    "Qwen3-4B",
    "Qwen3-8B",
    "Qwen3-14B",
    "Qwen3-32B",
    "Qwen3-30B-A3B",
    "Qwen3-235B-A22B",
    "Mixtral-8x7B-v0.1",
)


def main() -> None:
    for line in rows():
        print(line, flush=True)


def rows() -> Iterator[str]:
    yield "| | " + " | ".join(MACHINES) + " |"
    yield "|---|" + "---|" * len(MACHINES)
    for model in MODELS:
        cells = [cell(model, machine) for machine in MACHINES.values()]
        yield f"| {model} | " + " | ".join(cells) + " |"


def cell(model: str, machine: str) -> str:
    """Return settings, and GiB of the accelerator at its fullest moment."""
    options = tyro.cli(fit.Options, args=["--model", model, "--seq", "4096", *machine.split()])
    found, made = fit.fitted(options)
    return answer(fit.as_data(found, options, made))


def answer(said: dict[str, Any]) -> str:
    peak = f"{said['peak']['bytes'] / GIB:.1f}"
    if not said["fits"]:
        lacks = [f"{size / GIB:.0f} GiB of {name}" for name, size in said["missing"].items()]
        return "no: lacks " + ", ".join(lacks)
    certain = "" if said["certain"] else f" (if at most {said['slack']:.1%} too low)"
    return ", ".join([*words(said), f"**{peak}**{certain}"])


def words(said: dict[str, Any]) -> Iterator[str]:
    settings, layout = said["settings"], said["layout"]
    if layout["sharding"] == "fsdp2":
        yield "FSDP2"
    elif said["use_distributed_optimizer"]:
        yield "ZeRO"
    yield settings.get("state", "FP32")
    if "offload" in settings:
        yield f"host {settings['offload']:.0%}"
    named = {
        "released": "release_gradients" in settings,
        "streamed": "offload_place" in settings,
        "disk": "optimizer_state_path" in settings,
        "checkpointed": said["checkpointing"],
        "chunked loss": said["loss"] == "chunked",
    }
    yield from (name for name, is_so in named.items() if is_so)


if __name__ == "__main__":
    main()
