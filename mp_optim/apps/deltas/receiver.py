"""Apply published weight deltas to a copy of the model, in order and without a gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mp_optim.core.weight_delta import WeightDelta, WeightPatch
from mp_optim.host.torch_types import is_dtensor

_CURE = "ask the trainer for a full publication: changed_weights(full=True)"

Position = tuple[str, ...]
"""The last publication of each part that a receiver applied, as ``<run>:<number>``. JSON can store
it."""
Weights = nn.Module | Mapping[str, Tensor]


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
    if isinstance(model, nn.Module):
        model = dict(model.named_parameters(remove_duplicate=False))
    parts = [delta] if isinstance(delta, WeightDelta) else sorted(delta, key=lambda one: one.part)
    _check_parts(parts)
    for part in parts:
        _check_follows(part, after)
    tensors = dict(model)
    patches = [patch for part in parts for patch in part.patches]
    for patch in patches:
        _check_patch(patch, tensors)
    for patch in patches:
        _write(patch, tensors[patch.name])
    return tuple(f"{part.run}:{part.number}" for part in parts)


def _check_parts(parts: Sequence[WeightDelta]) -> None:
    if not parts:
        raise ValueError("apply_delta: delta is empty; pass the publications of all ranks")
    found, expected = [part.part for part in parts], [*range(parts[0].parts)]
    if found != expected or len({(part.number, part.is_full) for part in parts}) > 1:
        said = [f"part {part.part} of publication {part.number}" for part in parts]
        raise ValueError(
            f"apply_delta: {', '.join(said)}: a publication is taken whole, and this one has "
            f"{parts[0].parts} parts, one of each rank of the trainer: hand over all of them "
            "together"
        )


def _check_follows(delta: WeightDelta, after: Position | None) -> None:
    if delta.is_full:
        return
    if after is None:
        if delta.number == 1:
            return
        raise ValueError(
            f"apply_delta: publication {delta.number} has changes since the previous one, but "
            f"after=None: {_CURE}"
        )
    known = dict(enumerate(after)).get(delta.part, "")
    run, _, number = known.rpartition(":")
    if len(after) != delta.parts or run != delta.run:
        raise ValueError(
            f"apply_delta: publication {delta.number} belongs to run {delta.run!r}, but earlier "
            f"ones belong to run {run!r}, because the trainer restarted or called track_changes() "
            f"again: {_CURE}"
        )
    if delta.number <= int(number):
        raise ValueError(
            f"apply_delta: publication {delta.number} was applied already (the last one is "
            f"{number}): skip it, or, if the copy was reset to older weights, {_CURE}"
        )
    if delta.number > int(number) + 1:
        missed = f"publications {int(number) + 1} to {delta.number - 1} were"
        if delta.number == int(number) + 2:
            missed = f"publication {delta.number - 1} was"
        raise ValueError(
            f"apply_delta: {missed} missing before {delta.number}: apply them first, in order; if "
            f"they are lost, {_CURE}"
        )


def _check_patch(patch: WeightPatch, tensors: Mapping[str, Tensor]) -> None:
    tensor = tensors.get(patch.name)
    if tensor is None:
        known = ", ".join([*tensors][:3])
        raise ValueError(
            f"apply_delta: the model has no {patch.name!r} (but {known}, ...): pass a model with "
            "the names of the trainer's model"
        )
    if is_dtensor(tensor):
        raise ValueError(
            f"apply_delta: {patch.name} of the model is a DTensor: pass a dict of plain tensors"
        )
    if (tuple(tensor.shape), tensor.dtype) != (patch.shape, patch.dtype):
        raise ValueError(
            f"apply_delta: {patch.name} is {tuple(tensor.shape)} {tensor.dtype} in the model, and "
            f"{patch.shape} {patch.dtype} in the delta: load the trainer's model, in its dtypes"
        )


def _write(patch: WeightPatch, tensor: Tensor) -> None:
    values = patch.values.to(tensor.device)
    if patch.indices is None:
        tensor.copy_(values.view(patch.shape))
    elif tensor.is_contiguous():
        tensor.view(-1).index_copy_(0, patch.indices.to(tensor.device), values)
    else:
        places = torch.unravel_index(patch.indices.to(tensor.device), patch.shape)
        tensor[places] = values
