"""Publications as the objects that verl's checkpoint engine ``delta_sharded`` sends and receives.

The sender gathers entries of all ranks on rank 0. The receiver is a rollout adapter for SGLang or
vLLM, and applies flushes. ``docs/deltas.md`` names the sources of both layouts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mp_optim.apps.deltas.publications import (
    Weights,
    complete_parts,
    named_tensors,
    patches_by_name,
)
from mp_optim.core.weight_delta import WeightDelta, WeightPatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Entry = tuple[list[tuple[str, tuple[int, ...]]], str, Tensor, Tensor, Tensor, "ProcessGroup | None"]
Flush = tuple[list[tuple[str, Tensor]], bool]
_MOST_ELEMENTS = 1 << 31


def verl_entries(
    delta: WeightDelta,
    weights: Weights,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cuda",
) -> Iterator[Entry]:
    """Return a rank's part of a publication as the entries of verl's
    ``get_per_tensor_param_delta_shard()``: one entry a weight, in the order of ``weights``.

    In a subclass of verl's training engine, ``prime_delta_snapshots()`` calls
    ``optimizer.track_changes()``, and ``get_per_tensor_param_delta_shard()`` returns
    ``verl_entries(optimizer.changed_weights(), module, dist.group.WORLD), None``.

    Args:
        delta: the publication of this rank.
        weights: whole weights by name, or a module, also with DTensors. Only names, shapes and
            dtypes are read. They and their order are equal on all ranks.
        group: the group of all trainer ranks; None for one rank.
        device: device of the entries.

    Returns:
        An iterator of ``([(name, shape)], dtype, counts, indices, values, group)``. ``counts`` is
        an int64 tensor with the number of values, ``indices`` is int32.

    Raises:
        ValueError: the publication has a weight of another name, shape or dtype, or a weight that
            verl cannot send, as in :func:`verl_flushes`.
    """
    patches = {patch.name: patch for patch in delta.patches}
    sent: list[WeightPatch] = []
    for name, tensor in named_tensors(weights).items():
        nothing = torch.empty(0, dtype=tensor.dtype, device="cpu")
        unchanged = WeightPatch(name, tuple(tensor.shape), tensor.dtype, nothing, nothing)
        sent.append(patches.pop(name, unchanged))
        _check(sent[-1])
        if sent[-1][1:3] != unchanged[1:3]:
            patches[name] = sent[-1]
    if patches:
        name, shape, dtype, *_ = next(iter(patches.values()))
        raise ValueError(
            f"weights: no weight is {name} with {shape} {dtype}, as in the publication; pass the "
            "names, whole shapes and dtypes of the trainer's weights"
        )
    return (_entry(patch, group, device) for patch in sent)


def _entry(patch: WeightPatch, group: ProcessGroup | None, device: torch.device | str) -> Entry:
    counts = torch.tensor([patch.values.numel()], dtype=torch.int64, device="cpu")
    values, indices = patch.values.to(device), patch.positions().to(device, torch.int32)
    return [(patch.name, patch.shape)], _name_of(patch.dtype), counts, indices, values, group


def verl_flushes(
    delta: WeightDelta | Sequence[WeightDelta],
    *,
    most_bytes: int = 1 << 29,
    device: torch.device | str = "cuda",
) -> Iterator[Flush]:
    """Return a publication as the flushes that verl's ``receive_weights()`` yields. In a rollout
    worker ``ServerAdapter.update_weights(flushes, wire_format="delta_flush")`` applies them.

    A full publication has dense flushes, which also initialize a new worker. Flushes have no
    numbers, so pass every publication once and in order. The function needs
    ``torch.hash_tensor``, as verl's receivers.

    Args:
        delta: a publication, or the parts of all ranks.
        most_bytes: largest size of a flush in bytes, except for one whole weight.
        device: device of the flushes.

    Returns:
        An iterator of ``(named_tensors, is_last)``; empty if no weight changed.

    Raises:
        ValueError: parts are missing, a full publication lacks or repeats elements, or a weight
            cannot be sent: it is in 8 bits, has 2**31 elements or more, or has a NaN, which marks
            unchanged elements in verl's receivers.
        RuntimeError: this version of torch has no ``torch.hash_tensor``.
    """
    if not hasattr(torch, "hash_tensor"):
        raise RuntimeError(
            f"torch {torch.__version__} has no hash_tensor, with which verl's receivers check "
            "flushes; install the torch version of the rollout workers"
        )
    parts = complete_parts(delta)
    pieces: list[WeightPatch] = []
    for patches in patches_by_name(parts).values():
        merged = _merged(patches, parts[0].is_full)
        pieces += [merged] if merged.indices is None else _slices(merged, most_bytes)
    groups: list[list[WeightPatch]] = []
    size = 0
    for piece in pieces:
        size += _bytes_of(piece)
        if not groups or size > most_bytes or groups[-1][0].dtype != piece.dtype:
            groups.append([])
            size = _bytes_of(piece)
        groups[-1].append(piece)
    last = len(groups) - 1
    return ((_named_tensors(group, device), at == last) for at, group in enumerate(groups))


def _merged(patches: Sequence[WeightPatch], is_full: bool) -> WeightPatch:
    """Return the patches of one weight as one patch; without indices if all values are given."""
    for patch in patches:
        _check(patch)
    first = patches[0]
    values = torch.cat([patch.values for patch in patches])
    indices = torch.cat([patch.positions() for patch in patches])
    if not is_full:
        return first._replace(values=values, indices=indices)
    is_given = torch.zeros(first.numel, dtype=torch.bool, device=indices.device)
    is_given[indices] = True
    if values.numel() != first.numel or not is_given.all():
        raise ValueError(
            f"delta: the full publication has {values.numel()} values for {int(is_given.sum())} "
            f"of {first.numel} elements of {first.name}; pass the parts of all ranks, unchanged"
        )
    whole = torch.empty_like(values)
    whole[indices] = values
    return first._replace(values=whole, indices=None)


def _slices(patch: WeightPatch, most_bytes: int) -> Iterator[WeightPatch]:
    values, indices = patch.values, patch.positions()
    step = max(1, most_bytes // (values.element_size() + 4))
    for start in range(0, values.numel(), step):
        end = start + step
        yield patch._replace(values=values[start:end], indices=indices[start:end])


def _bytes_of(patch: WeightPatch) -> int:
    return patch.values.nbytes + (0 if patch.indices is None else 4 * patch.indices.numel())


def _named_tensors(
    group: Sequence[WeightPatch], device: torch.device | str
) -> list[tuple[str, Tensor]]:
    """Return one flush: a JSON of all patches as bytes, the indices as bytes, and the values."""
    is_dense = group[0].indices is None
    values = torch.cat([patch.values.to(device) for patch in group])
    positions = values.new_empty(0, dtype=torch.uint8)
    if not is_dense:
        indices = torch.cat([patch.positions().to(device, torch.int32) for patch in group])
        positions = indices.view(torch.uint8)
    params: list[dict[str, Any]] = []
    end = 0
    for patch in group:
        start, end = end, end + patch.values.numel()
        params.append(
            {
                "name": patch.name,
                "dtype": _name_of(patch.dtype),
                "shape": list(patch.shape),
                "pos_start": 0 if is_dense else 4 * start,
                "pos_end": 0 if is_dense else 4 * end,
                "pos_width": 4,
                "val_start": start,
                "val_end": end,
            }
        )
    spec = {
        "encoding": "dense" if is_dense else "indices",
        "params": params,
        "checksum": _hash(positions) ^ (_hash(values) << 1),
    }
    content = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
    found = [("__delta_spec__", content.to(device)), ("__values__", values)]
    return found if is_dense else [found[0], ("__positions__", positions), found[1]]


def _hash(tensor: Tensor) -> int:
    # torch 2.6 does not have this function.
    checksum = getattr(torch, "hash_tensor")  # noqa: B009
    return int(checksum(tensor).item()) if tensor.numel() else 0


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(patch: WeightPatch) -> None:
    reasons = {
        "is in 8 bits": patch.dtype.itemsize == 1,
        "has 2**31 elements or more": patch.numel >= _MOST_ELEMENTS,
        "has a NaN": patch.values.is_floating_point() and bool(patch.values.isnan().any()),
    }
    for reason, is_true in reasons.items():
        if is_true:
            raise ValueError(
                f"delta: {patch.name} {reason}, and verl's deltas cannot contain such a weight; "
                "send all weights without a delta"
            )
