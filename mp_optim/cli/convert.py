#!/usr/bin/env python
"""Convert optimizer state between libraries.

python -m mp_optim.cli.convert --source-format torch --source adamw.pt --names names.json \
    --target imported.pt
python -m mp_optim.cli.convert --source-format checkpoint --source runs/x/checkpoints \
    --target-format deepspeed --target universal

What --target-format mp_optim writes is loaded by
mp_optim.checkpoint.foreign.import_state(optimizer, from_file(path)).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from mp_optim.checkpoint import foreign


@dataclass
class Options:
    """From where to where."""

    source: Path
    """A file; for deepspeed the folder of a universal checkpoint; for checkpoint a folder of
    mp_optim's."""
    target: Path
    """A file; for torch and deepspeed a folder."""
    source_format: Literal[
        "torch", "megatron", "apex", "deepspeed", "mp_optim", "checkpoint"
    ]
    """torch: a state dict. megatron: of one rank that holds whole parameters. apex: {"optimizer":
    state dict, "masters": [group["params"] for group in optimizer.param_groups_master]}. mp_optim:
    what this tool wrote."""
    target_format: Literal["mp_optim", "torch", "deepspeed"] = "mp_optim"
    names: Path | None = None
    """Names of the parameters in the order of the source's param groups: a JSON list, or one in a
    line. Not needed where the source has them."""
    fp32_names: tuple[str, ...] = ()
    """Parameters that the model itself keeps in FP32 (megatron)."""
    masters: Path | None = None
    """File with the FP32 copies that were stepped, by name (torch)."""
    key: str = ""
    """Where the state is in the source file, such as "optimizer"; dots lead deeper."""
    step: float | None = None
    """Steps taken, where the source does not say."""
    strip_prefix: str = ""
    """Taken off the front of every name that has it, such as "module."."""


def _names(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    text = path.read_text()
    return list(json.loads(text)) if text.lstrip().startswith("[") else text.split()


def _loaded(options: Options) -> Any:
    """What is in the source file; plain data and tensors, or nothing is read."""
    content = torch.load(options.source, map_location="cpu", weights_only=True)
    for part in filter(None, options.key.split(".")):
        content = content[part]
    return content


def read(options: Options) -> foreign.ForeignState:
    """The source."""
    names = _names(options.names)
    if options.source_format == "deepspeed":
        return foreign.from_deepspeed(options.source, step=options.step)
    if options.source_format == "checkpoint":
        return foreign.from_checkpoint(options.source)
    if options.source_format == "mp_optim":
        return foreign.from_file(options.source)
    content = _loaded(options)
    if options.source_format == "apex":
        return foreign.from_apex(content["optimizer"], content.get("masters"), names)
    if options.source_format == "megatron":
        if names is None:
            raise ValueError("Megatron's state has no names: pass --names")
        return foreign.from_megatron(
            content, names, fp32_names=options.fp32_names, step=options.step
        )
    masters: Mapping[str, torch.Tensor] | None = None
    if options.masters is not None:
        masters = torch.load(options.masters, map_location="cpu", weights_only=True)
    return foreign.from_torch(content, names, masters=masters, step=options.step)


def write(state: foreign.ForeignState, options: Options) -> None:
    """The target."""
    if options.target_format == "deepspeed":
        foreign.to_deepspeed(state, options.target)
    elif options.target_format == "mp_optim":
        options.target.parent.mkdir(parents=True, exist_ok=True)
        foreign.to_file(state, options.target)
    else:
        options.target.mkdir(parents=True, exist_ok=True)
        torch.save(foreign.to_torch(state), options.target / "optimizer.pt")
        torch.save(foreign.fp32_params(state), options.target / "fp32_params.pt")


def main(options: Options) -> None:
    state = read(options)
    if options.strip_prefix:
        state = state.renamed(lambda name: name.removeprefix(options.strip_prefix))
    write(state, options)
    elements = sum(
        value.numel() for tensors in state.state.values() for value in tensors.values()
    )
    print(
        f"{len(state.names)} parameters, {elements:,} elements of state: {options.source} -> "
        f"{options.target}"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
