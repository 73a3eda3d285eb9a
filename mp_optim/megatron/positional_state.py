"""State that Megatron's Float16 optimizer saved with ``--ckpt-format torch``: FP32 copies and
moments by their position in its param groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mp_optim.checkpoint.foreign.megatron import from_megatron
from mp_optim.checkpoint.foreign.transfer import import_state
from mp_optim.megatron.saved_groups import matched_settings, same_kind
from mp_optim.precision import MegatronOptimizer
from mp_optim.slots import Slot

_COPIES = "fp32_from_fp16_params"


def is_positional(state_dict: Any) -> bool:
    """Whether Megatron's Float16 optimizer wrote this, alone or in a chain."""
    return any(_COPIES in part for part in _parts(state_dict))


def load_positional(
    stack: MegatronOptimizer, state_dict: Any, *, convert: bool = False
) -> None:
    """Load it into a stack over the same parameters, with the settings of its param groups.

    Args:
        convert: round state to the dtypes configured here also where that loses bits.

    Raises:
        ValueError: parts, param groups or shapes do not fit; nothing was loaded.
    """
    saved = _parts(state_dict)
    parts = [part for part in stack.chained_optimizers if not part.is_stub_optimizer]
    if len(saved) != len(parts):
        raise ValueError(
            f"the state dict has {len(saved)} parts, this optimizer {len(parts)}: expert-parallel "
            "ranks are as many as when it was saved with --ckpt-format torch, or save with "
            "--ckpt-format torch_dist"
        )
    names: list[str] = []
    for part, of_part in zip(parts, saved, strict=True):
        names += _names(part, of_part["optimizer"]["param_groups"])
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    live = [group for group in stack.param_groups if group["params"]]
    settings = [matched_settings(group, groups) for group in live]
    foreign = from_megatron(saved, names, fp32_names=[*_fp32_names(stack)])
    import_state(stack, foreign, convert=convert)
    for group, of_group in zip(live, settings, strict=True):
        group.update(of_group)


def _parts(state_dict: Any) -> list[Mapping[str, Any]]:
    """What is saved of each part of a chain, or of the only optimizer."""
    if not isinstance(state_dict, Mapping):
        return list(state_dict)
    numbered = sorted(key for key in state_dict if isinstance(key, int))
    return [state_dict[key] for key in numbered] or [state_dict]


def _names(
    part: MegatronOptimizer, saved: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Names of a part's parameters in the order of the saved groups."""
    left = [index for index, group in enumerate(part.param_groups) if group["params"]]
    for group in saved:
        count = len(group["params"])
        if not count:
            continue
        alike = [
            index
            for index in left
            if len(part.param_groups[index]["params"]) == count
            and same_kind(part.param_groups[index], group)
        ]
        if not alike:
            raise ValueError(
                f"no param group here is like the saved one of {count} parameters with "
                f"wd_mult={group.get('wd_mult')!r}, lr_mult={group.get('lr_mult')!r}: the model "
                "or its overrides were others"
            )
        left.remove(alike[0])
        for position in range(count):
            yield part.slot_name(Slot(alike[0], position))


def _fp32_names(stack: MegatronOptimizer) -> Iterator[str]:
    """Parameters that have no copy."""
    for slot in stack.slots():
        param = stack.param_groups[slot.group]["params"][slot.position]
        if param.dtype == torch.float32:
            yield stack.slot_name(slot)
