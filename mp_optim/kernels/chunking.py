"""Batches of tensor lists that fit into caches, and FP32 values of a batch in any storage
format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mp_optim.config.state_forms import BLOCK, blocks_of, packed_bytes
from mp_optim.core.slot_state import AVERAGE, REMAINDER, SECOND, is_scale, scale_key
from mp_optim.host.calls import tell_autograd
from mp_optim.kernels.codecs import Noise, decode, encode_, is_packed, join, split_, store_average
from mp_optim.kernels.kernel_args import TensorLists

Lists = list[Tensor]


def piece_elements(device: torch.device) -> int:
    """Return the largest number of elements of a batch, a power of two.

    A batch fits a CPU core's cache, or is large enough to occupy an accelerator.
    """
    return 1 << 17 if device.type == "cpu" else 1 << 24


def batches(lists: TensorLists, most: float = math.inf) -> Iterator[tuple[list[int], TensorLists]]:
    """Yield batches of flat views, each with the index in ``lists`` of each view's tensor.

    A batch has several small tensors, or pieces of large tensors. A tensor of more than
    :func:`piece_elements` elements is split at multiples of that number, so that each piece can be
    summed separately (see ``sums``). Other tensors are not split. Empty tensors are skipped.

    Args:
        lists: tensor lists.
        most: largest number of views in a batch. The views of a batch have at most
            :func:`piece_elements` elements together.
    """
    limit = piece_elements(lists.main[0].device) if lists.main else 1
    cuts: list[_Cut] = []
    filled = 0
    for index, main in enumerate(lists.main):
        for start in range(0, main.numel(), limit):
            count = min(main.numel() - start, limit)
            if filled + count > limit or len(cuts) == most:
                yield _batch(lists, cuts)
                cuts, filled = [], 0
            cuts.append((index, start, count))
            filled += count
    if cuts:
        yield _batch(lists, cuts)


_Cut = tuple[int, int, int]
"""Index of a tensor, first element and number of elements of a view."""


def _batch(lists: TensorLists, cuts: Sequence[_Cut]) -> tuple[list[int], TensorLists]:
    def flat(tensors: Sequence[Tensor]) -> Lists:
        return [tensors[index].view(-1).narrow(0, start, count) for index, start, count in cuts]

    owners, outputs, state = [index for index, _, _ in cuts], [], {}
    for index, start, count in cuts:
        output = lists.output[index]
        outputs.append(None if output is None else output.view(-1).narrow(0, start, count))
    for key, tensors in lists.state.items():
        state[key] = [part_of_state(key, tensors[i], start, count) for i, start, count in cuts]
    noise = lists.noise
    if noise is not None:
        noise = [replace(noise[i], start=noise[i].start + start) for i, start, _ in cuts]
    cut = TensorLists(flat(lists.main), flat(lists.grad), state, outputs, noise)
    return owners, replace(cut, average_weight=lists.average_weight, follows=lists.follows)


def runs_of(sizes: Iterable[tuple[int, int]], most: int) -> Iterator[list[int]]:
    """Yield runs of consecutive indices. The tensors of a run have at most ``most`` elements
    together.

    A tensor with more than ``most`` elements is the only tensor of a run.

    Args:
        sizes: index and number of elements of each tensor.
        most: largest number of elements of a run.
    """
    members: list[int] = []
    room = most
    for index, size in sizes:
        if members and size > room:
            yield members
            members, room = [], most
        members.append(index)
        room -= size
    if members:
        yield members


def part_of_state(key: str, tensor: Tensor, start: int, count: int) -> Tensor:
    """Return a 1-D view of the part of a state tensor that encodes some elements.

    Args:
        key: key of the state tensor.
        tensor: the state tensor.
        start: first element, a multiple of 256.
        count: number of elements: a multiple of 256, or all elements up to the end.
    """
    # Detach, because torch's swap_tensors raises while a view of the tensor exists.
    tensor = tensor.detach()
    if is_scale(key):
        return tensor.narrow(0, start // BLOCK, blocks_of(count))
    if is_packed(key, tensor.dtype):
        return tensor.narrow(0, start // 2, packed_bytes(count))
    return tensor.view(-1).narrow(0, start, count)


def write_outputs(lists: TensorLists) -> None:
    """Copy main params to outputs, rounded to nearest even."""
    pairs = [
        (output, main)
        for output, main in zip(lists.output, lists.main, strict=True)
        if output is not None
    ]
    if pairs:
        outputs = [output for output, _ in pairs]
        torch._foreach_copy_(outputs, [main for _, main in pairs])


def mark_written(lists: TensorLists) -> None:
    """Increase the versions of tensors that a kernel wrote, because autograd cannot detect writes
    of a kernel."""
    tell_autograd(model_tensors(lists))


def model_tensors(lists: TensorLists) -> list[Tensor]:
    """Return the written tensors that autograd may track: outputs, and main params without an
    output.

    A main param without an output may be the model's parameter.
    """
    outputs = lists.output
    # A pass without main params writes no parameters, so autograd has nothing to track.
    if not lists.main:
        return []
    return [m if o is None else o for m, o in zip(lists.main, outputs, strict=True)]


# -- FP32 values, for rules in torch operations ---------------------------------------------------


def read_moment(batch: TensorLists, name: str) -> Lists:
    """Return a moment in FP32: the stored tensors if they are FP32, else decoded copies."""
    scales = batch.state.get(scale_key(name), [None] * len(batch.main))
    return [
        decode(stored, scale, name == SECOND, main.numel())
        for stored, scale, main in zip(batch.state[name], scales, batch.main, strict=True)
    ]


def write_moment(batch: TensorLists, name: str, values: Lists) -> None:
    """Store a moment, given in FP32, in its storage format."""
    scales = batch.state.get(scale_key(name), [None] * len(batch.main))
    for value, stored, scale, noise in zip(
        values, batch.state[name], scales, _noise(batch), strict=True
    ):
        encode_(value, stored, scale, name == SECOND, noise)


def _noise(batch: TensorLists) -> Sequence[Noise | None]:
    return [None] * len(batch.main) if batch.noise is None else batch.noise


def read_mains(batch: TensorLists) -> Lists:
    """Return main params in FP32: the stored tensors if they are FP32, else copies joined with
    remainders."""
    rests = batch.state.get(REMAINDER, [None] * len(batch.main))
    return [join(main, remainder) for main, remainder in zip(batch.main, rests, strict=True)]


def write_mains(batch: TensorLists, values: Lists) -> None:
    """Store main params, given in FP32, and write outputs and averages.

    Args:
        batch: the batch.
        values: the result of :func:`read_mains`, stepped in place.
    """
    rests = batch.state.get(REMAINDER, [None] * len(batch.main))
    for value, main, rest, noise in zip(values, batch.main, rests, _noise(batch), strict=True):
        if main.dtype != torch.float32:
            split_(value, main, rest, noise)
    write_outputs(batch)
    take_averages(batch)


def take_averages(batch: TensorLists) -> None:
    """Update the averages with the stored main params. Does nothing without averages."""
    if AVERAGE not in batch.state:
        return
    weight = batch.average_weight
    for main, average, noise in zip(
        read_mains(batch), batch.state[AVERAGE], _noise(batch), strict=True
    ):
        if weight == 1.0:
            store_average(main, average, noise)
            continue
        value = average.float()
        distance = torch.sub(main, value).mul_(weight)
        store_average(distance.add_(value), average, noise)
