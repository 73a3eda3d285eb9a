"""``state_dict()`` of Megatron's Float16OptimizerWithFloat16Params, FP32Optimizer and
ChainedOptimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from mp_optim.checkpoint.foreign.state import (
    ForeignGroup,
    ForeignState,
    positional_state,
)


def from_megatron(
    state_dict: Mapping[Any, Any] | Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    fp32_names: Collection[str] = (),
    step: float | None = None,
) -> ForeignState:
    """State of one rank that holds whole parameters (no distributed optimizer, no tensor
    parallelism).

    Args:
        state_dict: ``state_dict()``; for a chain its list, or the dict by number that Megatron
            makes of it on disk.
        names: of all parameters, in the order of ``optimizer.param_groups``, part after part.
        fp32_names: parameters that the model itself keeps in FP32 (routers, say), which have no
            copy.
        step: steps taken, if the state does not say.

    Raises:
        ValueError: names and state do not fit each other.
    """
    parts = _parts(state_dict)
    counts = [_count(part) for part in parts]
    if len(names) != sum(counts):
        raise ValueError(
            f"{len(names)} names for parts of {counts} parameters, {sum(counts)} together"
        )
    groups: list[ForeignGroup] = []
    state: dict[str, Mapping[str, Tensor]] = {}
    start = 0
    for part, count in zip(parts, counts, strict=True):
        named = _part(part, names[start : start + count], fp32_names, step)
        groups += named.groups
        state |= named.state
        start += count
    scaler = next(
        (part["grad_scaler"] for part in parts if part.get("grad_scaler")), None
    )
    return ForeignState(tuple(groups), state, scaler)


def _count(part: Mapping[str, Any]) -> int:
    """Parameters of a part."""
    return sum(len(group["params"]) for group in _inner(part)["param_groups"])


def _parts(
    state_dict: Mapping[Any, Any] | Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    if not isinstance(state_dict, Mapping):
        return list(state_dict)
    if state_dict and all(
        isinstance(key, int) or str(key).isdigit() for key in state_dict
    ):
        return [state_dict[key] for key in sorted(state_dict, key=int)]
    return [state_dict]


def _inner(part: Mapping[str, Any]) -> Mapping[str, Any]:
    inner: Mapping[str, Any] = part.get(
        "optimizer", part.get("optimizer_state_dict", part)
    )
    if "param_groups" not in inner or "state" not in inner:
        raise ValueError(
            f"no state of Megatron's Float16 or FP32 optimizer: it has {sorted(map(str, inner))}. "
            "The distributed optimizer's is a shard of each parameter: save it with --ckpt-format "
            "torch_dist and without --use-distributed-optimizer first"
        )
    return inner


def _part(
    part: Mapping[str, Any],
    names: Sequence[str],
    fp32_names: Collection[str],
    step: float | None,
) -> ForeignState:
    foreign = positional_state(_inner(part), names, step)
    masters = part.get("fp32_from_fp16_params", part.get("fp32_from_fp16"))
    if masters is None:
        return foreign
    copies: dict[str, Tensor] = {}
    for index, (group, tensors) in enumerate(zip(foreign.groups, masters, strict=True)):
        halves = [name for name in group.names if name not in fp32_names]
        if len(halves) != len(tensors):
            raise ValueError(
                f"param group {index} has {len(tensors)} FP32 copies for {len(halves)} 16-bit "
                "parameters; name those that the model keeps in FP32 in fp32_names="
            )
        copies.update(zip(halves, tensors, strict=True))
    return foreign.with_masters(copies)
