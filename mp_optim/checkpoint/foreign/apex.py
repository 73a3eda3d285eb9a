"""apex's FusedAdam, whose FP32 copies (``param_groups_master``) are not in its state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mp_optim.checkpoint.foreign.state import ForeignState, positional_state


def from_apex(
    state_dict: Mapping[str, Any],
    masters: Sequence[Sequence[Tensor | None]] | None,
    names: Sequence[str] | None = None,
) -> ForeignState:
    """State of ``apex.optimizers.FusedAdam``, whose step counts are its groups'.

    Args:
        state_dict: as ``state_dict()`` gives it.
        masters: ``[group["params"] for group in optimizer.param_groups_master]``; None without
            ``master_weights``.
        names: of all parameters in order; not needed if the groups have ``param_names``.

    Raises:
        ValueError: names, groups and masters do not fit each other.
    """
    foreign = positional_state(state_dict, names)
    if masters is None:
        return foreign
    counts = [len(group.names) for group in foreign.groups]
    if [len(group) for group in masters] != counts:
        raise ValueError(
            f"masters of {[len(group) for group in masters]} parameters for groups of {counts} "
            "(apex's add_param_group adds no masters)"
        )
    copies = {
        name: tensor
        for group, tensors in zip(foreign.groups, masters, strict=True)
        for name, tensor in zip(group.names, tensors, strict=True)
        if tensor is not None
    }
    return foreign.with_masters(copies)
