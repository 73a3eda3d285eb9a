"""DTensor parameters: state shown in their layout."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.config.rules import is_elementwise
from mp_optim.slots import local_tensor


def as_sharded(local: Tensor, param: Tensor, key: str = "") -> Tensor:
    """State of a DTensor parameter as a DTensor of the same layout; scalars, what every rank keeps
    whole and that of plain parameters unchanged.

    Args:
        key: of the state; empty for a main param.
    """
    if (
        not isinstance(param, DTensor)
        or not is_elementwise(key)
        or not isinstance(local, Tensor)
        or (local.dim() == 0 and param.dim() > 0)
    ):
        return local
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def as_local_state(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`as_sharded` for a slot's whole state; never modifies its argument."""
    return {
        key: local_tensor(value) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }
