"""FP32 values of what a rule steps, however they are stored: for rules in torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mp_optim.slots.state_keys import AVERAGE, REMAINDER, SECOND, scale_key
from mp_optim.update.chunking import publish
from mp_optim.update.codecs import (
    Noise,
    decode,
    encode_,
    join,
    split_,
    store_average,
)
from mp_optim.update.kernel_args import TensorLists

Lists = list[Tensor]


def read_moment(batch: TensorLists, name: str) -> Lists:
    """FP32 values of a moment: the tensors themselves if they are FP32, else copies."""
    scales = batch.state.get(scale_key(name), [None] * len(batch.main))
    return [
        decode(stored, scale, name == SECOND, main.numel())
        for stored, scale, main in zip(
            batch.state[name], scales, batch.main, strict=True
        )
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
    """FP32 main params: the tensors themselves, or copies joined with their remainders."""
    if REMAINDER not in batch.state:
        return batch.main
    return [
        join(main, remainder)
        for main, remainder in zip(batch.main, batch.state[REMAINDER], strict=True)
    ]


def write_mains(batch: TensorLists, values: Lists) -> None:
    """Store FP32 main params, stepped in place in what :func:`read_mains` gave, and write
    the outputs."""
    if REMAINDER in batch.state:
        for value, main, rest, noise in zip(
            values, batch.main, batch.state[REMAINDER], _noise(batch), strict=True
        ):
            split_(value, main, rest, noise)
    publish(batch)
    take_averages(batch)


def take_averages(batch: TensorLists) -> None:
    """Let the averages take the new main params, as these are stored. Nothing to do where none are
    kept."""
    weight = batch.average_weight
    for main, average, noise in zip(
        read_mains(batch) if AVERAGE in batch.state else (),
        batch.state.get(AVERAGE, ()),
        _noise(batch),
        strict=False,
    ):
        if weight == 1.0:
            store_average(main, average, noise)
            continue
        value = average.float()
        distance = torch.sub(main, value).mul_(weight)
        store_average(distance.add_(value), average, noise)
