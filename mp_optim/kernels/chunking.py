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
    """Return the number of elements of a batch, a power of two.

    It is small enough for a CPU core's cache, and large enough to occupy an accelerator.
    """
    return 1 << 17 if device.type == "cpu" else 1 << 24


def batches(lists: TensorLists, most: float = math.inf) -> Iterator[tuple[list[int], TensorLists]]:
    """Yield batches of flat views, each with the indices of their tensors in ``lists``.

    A batch has at most ``most`` small tensors, or pieces of large ones, of at most
    :func:`piece_elements` elements together. A tensor that fits into one batch is never split. A
    larger one is split at multiples of :func:`piece_elements`, so that each piece can be summed
    separately (see ``sums``). Empty tensors are skipped.
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
"""Index of a tensor, its first element in the batch, and the number of elements."""


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
    """Yield runs of consecutive indices with at most ``most`` elements together.

    A larger tensor is a run of its own.

    Args:
        sizes: indices, each with its number of elements.
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
    """Return the part of a state tensor for ``count`` elements from ``start`` on, 1-D.

    Args:
        key: name of the state tensor.
        tensor: the state tensor.
        start: first element, a multiple of 256.
        count: a multiple of 256, or all remaining elements.
    """
    tensor = tensor.detach()  # torch cannot swap a tensor while a view of it exists.
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
    """Increase the versions of tensors that a kernel wrote, because autograd cannot detect it."""
    tell_autograd(model_tensors(lists))


def model_tensors(lists: TensorLists) -> list[Tensor]:
    """Return the written tensors that autograd may track.

    They are outputs, and main params without an output, which may be the model's parameters.
    """
    outputs = lists.output
    if not lists.main:  # The pass writes no parameters.
        return []
    return [m if o is None else o for m, o in zip(lists.main, outputs, strict=True)]


# -- FP32 values, for rules in torch operations ---------------------------------------------------


def read_moment(batch: TensorLists, name: str) -> Lists:
    """Return FP32 values of a moment: the tensors themselves if they are FP32, else copies."""
    scales = batch.state.get(scale_key(name), [None] * len(batch.main))
    return [
        decode(stored, scale, name == SECOND, main.numel())
        for stored, scale, main in zip(batch.state[name], scales, batch.main, strict=True)
    ]


def write_moment(batch: TensorLists, name: str, values: Lists) -> None:
    """Store FP32 values of a moment."""
    scales = batch.state.get(scale_key(name), [None] * len(batch.main))
    for value, stored, scale, noise in zip(
        values, batch.state[name], scales, _noise(batch), strict=True
    ):
        encode_(value, stored, scale, name == SECOND, noise)


def _noise(batch: TensorLists) -> Sequence[Noise | None]:
    return [None] * len(batch.main) if batch.noise is None else batch.noise


def read_mains(batch: TensorLists) -> Lists:
    """Return FP32 main params: the tensors themselves, or copies joined with their remainders."""
    rests = batch.state.get(REMAINDER, [None] * len(batch.main))
    return [join(main, remainder) for main, remainder in zip(batch.main, rests, strict=True)]


def write_mains(batch: TensorLists, values: Lists) -> None:
    """Store FP32 main params that were stepped in the result of :func:`read_mains`, and write the
    outputs."""
    rests = batch.state.get(REMAINDER, [None] * len(batch.main))
    for value, main, rest, noise in zip(values, batch.main, rests, _noise(batch), strict=True):
        if main.dtype != torch.float32:
            split_(value, main, rest, noise)
    write_outputs(batch)
    take_averages(batch)


def take_averages(batch: TensorLists) -> None:
    """Update the averages with the new main params, as stored. Does nothing without averages."""
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
