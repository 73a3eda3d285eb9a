"""Cuts tensor lists into batches that are worked on while they are in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mp_optim.update.lists import TensorLists

__all__ = ["batches", "piece_elements"]


def piece_elements(device: torch.device) -> int:
    """Elements per batch: what stays in a core's cache on a CPU, what fills an accelerator elsewhere."""
    return 1 << 17 if device.type == "cpu" else 1 << 24


def batches(lists: TensorLists) -> Iterator[TensorLists]:
    """Flat views of many small tensors or of pieces of large ones, at most :func:`piece_elements` together."""
    limit = piece_elements(lists.main[0].device) if lists.main else 1
    batch = _empty(lists)
    filled = 0
    for index, main in enumerate(lists.main):
        start = 0
        while start < main.numel():
            count = min(main.numel() - start, limit - filled)
            _append(batch, lists, index, start, count)
            start, filled = start + count, filled + count
            if filled == limit:
                yield batch
                batch, filled = _empty(lists), 0
    if filled:
        yield batch


def _empty(lists: TensorLists) -> TensorLists:
    return TensorLists([], [], {key: [] for key in lists.state}, [])


def _append(batch: TensorLists, lists: TensorLists, index: int, start: int, count: int) -> None:
    output = lists.output[index]
    batch.main.append(lists.main[index].view(-1).narrow(0, start, count))
    batch.grad.append(lists.grad[index].view(-1).narrow(0, start, count))
    batch.output.append(None if output is None else output.view(-1).narrow(0, start, count))
    for key, tensors in lists.state.items():
        batch.state[key].append(tensors[index].view(-1).narrow(0, start, count))
