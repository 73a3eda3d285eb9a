"""Apply published weight deltas to a copy of the model, in order and without a gap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mp_optim.apps.deltas.publications import (
    Position,
    Weights,
    check_patch,
    named_tensors,
    next_parts,
    position_of,
)
from mp_optim.core.weight_delta import WeightDelta, WeightPatch, as_integers


@torch.no_grad()
def apply_delta(
    model: Weights, delta: WeightDelta | Sequence[WeightDelta], after: Position | None = None
) -> Position:
    """Write published values to a copy of the model. All checks run before the first write.

    Args:
        model: a module of plain parameters, or tensors by name.
        delta: one publication of one rank, or of all ranks.
        after: result of the previous call; None if the copy has the weights that the trainer had at
            ``track_changes()``, or if the publication has all weights.

    Returns:
        The position of the copy, for the next call.

    Raises:
        ValueError: the publication does not follow ``after`` (some are missing, it was applied
            already, or it belongs to another run), parts are missing, or a parameter is missing or
            has another shape or dtype. The error has the name and the cure; nothing was written.
    """
    tensors = named_tensors(model)
    parts = next_parts(delta, after)
    patches = [patch for part in parts for patch in part.patches]
    for patch in patches:
        check_patch(patch, tensors)
    for patch in patches:
        write_patch(patch, tensors[patch.name])
    return position_of(parts)


def write_patch(patch: WeightPatch, tensor: Tensor) -> None:
    """Write the values of a patch to a tensor of the patch's shape and dtype."""
    values = patch.values.to(tensor.device)
    if patch.indices is None:
        tensor.copy_(values.view(patch.shape))
    elif tensor.is_contiguous():
        # index_copy_() has no kernel for float8 dtypes, so codes are copied as integers.
        flat, places = as_integers(tensor.view(-1)), patch.indices.to(tensor.device)
        flat.index_copy_(0, places, as_integers(values))
    else:
        tensor[torch.unravel_index(patch.indices.to(tensor.device), patch.shape)] = values
