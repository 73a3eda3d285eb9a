"""Checks of a publication: all parts are present, the order is right, and the weights fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mp_optim.core.weight_delta import WeightDelta, WeightPatch, bits_differ
from mp_optim.host.torch_types import is_dtensor

_CURE = "ask the trainer for a full publication: changed_weights(full=True)"

Position = tuple[str, ...]
"""The last publication of each part that a receiver applied, as ``<run>:<number>``. JSON can store
it."""
Weights = nn.Module | Mapping[str, Tensor]


def named_tensors(weights: Weights) -> dict[str, Tensor]:
    """Return the parameters of a module, or the given tensors, by name."""
    if isinstance(weights, nn.Module):
        return dict(weights.named_parameters(remove_duplicate=False))
    return dict(weights)


def position_of(parts: Sequence[WeightDelta]) -> Position:
    """Return the position of a copy that has all parts of a publication."""
    return tuple(f"{part.run}:{part.number}" for part in parts)


def complete_parts(delta: WeightDelta | Sequence[WeightDelta]) -> list[WeightDelta]:
    """Return the parts of a publication, sorted by rank. Raise ValueError if parts are missing."""
    parts = [delta] if isinstance(delta, WeightDelta) else sorted(delta, key=lambda one: one.part)
    if not parts:
        raise ValueError("delta=[]: the list is empty; pass the publications of all ranks")
    found, expected = [part.part for part in parts], [*range(parts[0].parts)]
    if found != expected or len({(part.number, part.is_full) for part in parts}) > 1:
        given = [f"part {part.part} of publication {part.number}" for part in parts]
        raise ValueError(
            f"delta: given are {', '.join(given)}, but a publication has {parts[0].parts} parts, "
            "one from each rank of the trainer; pass all parts of one publication together"
        )
    return parts


def next_parts(
    delta: WeightDelta | Sequence[WeightDelta], after: Position | None
) -> list[WeightDelta]:
    """Return the parts of a publication, sorted by rank.

    Args:
        delta: one publication of one rank, or of all ranks.
        after: position of the copy that the publication is for; None before the first.

    Raises:
        ValueError: parts are missing, or the publication does not follow ``after``.
    """
    parts = complete_parts(delta)
    for part in parts:
        _check_follows(part, after)
    return parts


def _check_follows(delta: WeightDelta, after: Position | None) -> None:
    if delta.is_full:
        return
    if after is None:
        if delta.number == 1:
            return
        raise ValueError(
            f"delta: publication {delta.number} has only changes since publication "
            f"{delta.number - 1}, but no publication was applied (after=None); {_CURE}"
        )
    known = dict(enumerate(after)).get(delta.part, "")
    run, _, number = known.rpartition(":")
    if len(after) != delta.parts or run != delta.run:
        raise ValueError(
            f"delta: publication {delta.number} belongs to run {delta.run!r}, but earlier "
            f"publications belong to run {run!r}, because the trainer restarted or called "
            f"track_changes() again; {_CURE}"
        )
    if delta.number <= int(number):
        raise ValueError(
            f"delta: publication {delta.number} was applied already (the last applied publication "
            f"is {number}); skip this publication, or, if the copy was reset to older weights, "
            f"{_CURE}"
        )
    if delta.number > int(number) + 1:
        missed = f"publications {int(number) + 1} to {delta.number - 1} were"
        if delta.number == int(number) + 2:
            missed = f"publication {delta.number - 1} was"
        raise ValueError(
            f"delta: {missed} not applied before publication {delta.number}; apply missing "
            f"publications first, in order, or, if a publication is lost, {_CURE}"
        )


def check_patch(patch: WeightPatch, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a patch does not fit the tensor of its name."""
    tensor = tensors.get(patch.name)
    if tensor is None:
        known = ", ".join([*tensors][:3])
        raise ValueError(
            f"delta: the model has no {patch.name!r} (names of the model: {known}, ...); pass a "
            "model with the names of the trainer's model"
        )
    if is_dtensor(tensor):
        raise ValueError(
            f"delta: {patch.name} of the model is a DTensor; pass a dict of plain tensors"
        )
    if (tuple(tensor.shape), tensor.dtype) != (patch.shape, patch.dtype):
        raise ValueError(
            f"delta: {patch.name} is {tuple(tensor.shape)} {tensor.dtype} in the model, and "
            f"{patch.shape} {patch.dtype} in the delta; build the model with the trainer's shapes "
            "and dtypes"
        )


def patches_by_name(parts: Sequence[WeightDelta]) -> dict[str, list[WeightPatch]]:
    """Return the patches of all parts of a publication, by name of the parameter."""
    found: dict[str, list[WeightPatch]] = {}
    for part in parts:
        for patch in part.patches:
            found.setdefault(patch.name, []).append(patch)
    return found


def published_elements(
    parts: Sequence[WeightDelta], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """Return the indices of all published elements, by name of the parameter: ascending and
    row-major, or None for all elements of the parameter.

    Args:
        parts: all parts of a publication.
        tensors: the published weights, by name.

    Raises:
        ValueError: a patch does not fit the weights, or the weights differ from its values.
    """
    found: dict[str, list[Tensor | None]] = {}
    for part in parts:
        for patch in part.patches:
            check_patch(patch, tensors)
            flat = tensors[patch.name].detach().reshape(-1)
            indices = None if patch.indices is None else patch.indices.to(flat.device)
            held = flat if indices is None else flat[indices]
            if bits_differ(held, patch.values.to(flat.device)).numel():
                raise ValueError(
                    f"weights: {patch.name} differs from the values in publication {part.number}; "
                    "pass the published weights before the next step changes them"
                )
            found.setdefault(patch.name, []).append(None if part.is_full else indices)
    return {name: _union(each) for name, each in found.items()}


def _union(indices: Sequence[Tensor | None]) -> Tensor | None:
    present = [each for each in indices if each is not None]
    return torch.cat(present).sort().values if len(present) == len(indices) else None


def patch_of(name: str, tensor: Tensor, elements: Tensor | None) -> WeightPatch:
    """Return a patch with copies of the elements of a tensor at the row-major indices ``elements``.
    None copies all elements."""
    flat = tensor.detach().reshape(-1)
    values = flat.clone() if elements is None else flat[elements]
    return WeightPatch(name, tuple(tensor.shape), tensor.dtype, values, elements)
