r"""Convert optimizer state between libraries.

$ mp-optim convert --source-format torch --source adamw.pt --names names.json --target new.pt
$ mp-optim convert --source-format checkpoint --source runs/x/checkpoints \
    --target-format torch --target for_torch

Load a file of --target-format mp_optim with mp_optim.apps.convert.import_state(optimizer,
from_file(path)).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from mp_optim.apps import convert as foreign
from mp_optim.apps.convert.torch_files import load_plain_file


@dataclass
class Options:
    """Source and target of a conversion.

    Attributes:
        source: a file; for deepspeed the folder of a universal checkpoint; for checkpoint a folder
            written by mp_optim.checkpoint.save.
        target: a file; for torch a folder.
        source_format: torch: a state dict. megatron: state of one rank with whole parameters. apex:
            {"optimizer": state dict, "masters": [group["params"] for group in
            optimizer.param_groups_master]}. deepspeed: a universal checkpoint. mp_optim: a file of
            this command. checkpoint: a checkpoint of this package.
        target_format: mp_optim: a file for this command and import_state. torch: optimizer.pt and
            fp32_params.pt.
        names: names of the parameters in the order of the source's param groups: a JSON list, or
            one name a line. Not needed if the source has names.
        fp32_names: parameters that the model itself keeps in FP32 (megatron).
        masters: file with the FP32 main params, by name (torch).
        key: key of the state in the source file, such as "optimizer"; dots separate nested keys.
        step: number of steps taken, if the source does not have it.
        strip_prefix: prefix to remove from parameter names, such as "module.".
    """

    source: Path
    target: Path
    source_format: Literal["torch", "megatron", "apex", "deepspeed", "mp_optim", "checkpoint"]
    target_format: Literal["mp_optim", "torch"] = "mp_optim"
    names: Path | None = None
    fp32_names: tuple[str, ...] = ()
    masters: Path | None = None
    key: str = ""
    step: float | None = None
    strip_prefix: str = ""


def read(options: Options) -> foreign.ForeignState:
    """Read the source, and check that its tensors take no more memory than the file.

    Raises:
        ValueError: the source has another format, or a tensor is larger than its bytes in the file.
    """
    try:
        state = _read(options)
        for name, tensors in state.state.items():
            for key, value in tensors.items():
                stored = value.untyped_storage().nbytes()
                # Refuse an expanded tensor, because a conversion would write all of its elements.
                if value.nbytes > stored:
                    raise ValueError(
                        f"{name}.{key}: a tensor of shape {tuple(value.shape)} has {value.nbytes} "
                        f"bytes, but the file stores only {stored} of these bytes (an expanded "
                        "tensor); call .contiguous() on the tensor and save the file again"
                    )
    except ValueError as error:
        is_named = str(options.source) in str(error)
        raise ValueError(str(error) if is_named else f"{options.source}: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--source-format {options.source_format}: {options.source} has another format "
            f"({type(error).__name__}: {error}); pass the file's format as --source-format. If the "
            "state is nested in the file, pass its key as --key"
        ) from error
    return state


def _read(options: Options) -> foreign.ForeignState:
    if options.source_format == "deepspeed":
        return foreign.from_deepspeed(options.source, step=options.step)
    if options.source_format == "checkpoint":
        return foreign.from_checkpoint(options.source)
    if options.source_format == "mp_optim":
        return foreign.from_file(options.source)
    content, names = load_plain_file(options.source), None
    for part in filter(None, options.key.split(".")):
        if not isinstance(content, Mapping) or part not in content:
            keys = sorted(map(str, content)) if isinstance(content, Mapping) else []
            raise ValueError(
                f"--key {options.key}: the key {part!r} is missing in {options.source}; "
                + (f"write one of {keys} in its place" if keys else "leave out --key")
            )
        content = content[part]
    if options.names is not None:
        text = options.names.read_text()
        names = list(json.loads(text)) if text.lstrip().startswith("[") else text.split()
    if options.source_format == "apex":
        return foreign.from_apex(content["optimizer"], content.get("masters"), names)
    if options.source_format == "megatron":
        if names is None:
            raise ValueError(
                "--source-format megatron: the state has no parameter names; pass --names FILE, a "
                "file with one parameter name per line"
            )
        return foreign.from_megatron(
            content, names, fp32_names=options.fp32_names, step=options.step
        )
    masters = None if options.masters is None else load_plain_file(options.masters)
    return foreign.from_torch(content, names, masters=masters, step=options.step)


def main(arguments: Sequence[str]) -> int:
    """Convert the source into the target, print a summary, and return the exit status."""
    prog = "mp-optim convert"
    options = tyro.cli(Options, args=arguments, prog=prog, description=__doc__)
    state = read(options)
    if options.strip_prefix:
        state = state.renamed(lambda name: name.removeprefix(options.strip_prefix))
    if options.target_format == "mp_optim":
        options.target.parent.mkdir(parents=True, exist_ok=True)
        foreign.to_file(state, options.target)
    else:
        options.target.mkdir(parents=True, exist_ok=True)
        torch.save(foreign.to_torch(state), options.target / "optimizer.pt")
        torch.save(foreign.fp32_params(state), options.target / "fp32_params.pt")
    elements = sum(value.numel() for tensors in state.state.values() for value in tensors.values())
    print(
        f"{len(state.names)} parameters, {elements:,} elements of state: {options.source} -> "
        f"{options.target}"
    )
    return 0
