"""Checksums of tensors' bits, equal on every device; checksums of the weights that a step wrote;
and the norm of all gradients of a step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import compress

import torch
from torch import Tensor

from mp_optim.core import SlotUpdate
from mp_optim.kernels import choose_backend
from mp_optim.kernels.chunking import piece_elements
from mp_optim.kernels.codecs import mix
from mp_optim.kernels.native_library import native_library, thread_count
from mp_optim.kernels.sums import Groups, reduce_over

_WIDTH = 1024
"""Number of elements in a row of a checksum's table."""
_PIECE = 1 << 22
"""Largest number of elements that are converted to int64 together."""
_PRIME = 0x01000193


def checksums_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return a 32-bit checksum for each tensor of 2-byte elements, in row-major order.

    Synchronizes once with the device of the tensors.
    """
    sums = [sum_of_bits(tensor) for tensor in tensors]
    if not sums:
        return []
    totals: list[int] = torch.stack([value.to(sums[0].device) for value in sums]).tolist()
    return [
        mix((value & 0xFFFFFFFF) ^ mix(tensor.numel() & 0xFFFFFFFF))
        for value, tensor in zip(totals, tensors, strict=True)
    ]


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return a checksum of a plain tensor's bits: int64, shape (), on the tensor's device.

    The checksum depends on positions: each 16-bit value is multiplied by a weight of its row of
    1,024 values and by a weight of its column. One-byte elements count as 16-bit values.
    """
    # Return early, because view() raises for an empty tensor with strides of 0.
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    bits = tensor.detach().contiguous().view(-1)
    bits = bits.view(torch.int16) if bits.itemsize > 1 else bits.view(torch.int8).short()
    library = native_library()
    if bits.is_cpu and library.handle is not None:
        total = torch.zeros((), dtype=torch.int64, device="cpu")
        if bits.numel():
            to, threads = total.data_ptr(), thread_count()
            library.call("mp_weighted_sum", bits.data_ptr(), bits.numel(), to, threads)
        return total
    columns = _weights(0, _WIDTH, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    piece = min(piece_elements(tensor.device), _PIECE)
    for start in range(0, bits.numel(), piece):
        part = bits[start : start + piece]
        rows = torch.nn.functional.pad(part, (0, -part.numel() % _WIDTH)).view(-1, _WIDTH)
        by_row = (rows * columns).sum(1)
        total += (by_row * _weights(start // _WIDTH, rows.shape[0], tensor.device)).sum()
    return total


def _weights(start: int, count: int, device: torch.device) -> Tensor:
    """Return odd weights below 2^31: int64, shape (count,). Multiplying by an odd number is
    invertible."""
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return (index * _PRIME + 0x9E3779B9) % 0x7FFFFFFF | 1


class WrittenWeights:
    """Checksums of model weights after the last step, computed on the devices of the weights.

    A kernel can compare a weight with its main param only if both tensors are on one device and the
    weight is not quantized. For other weights, the weight's device computes a checksum after a step
    and before the next step. A weight is copied and compared with its main param only if the two
    checksums differ.
    """

    def __init__(self) -> None:
        self._sums: dict[Hashable, Tensor] = {}

    def note(self, keys: Sequence[Hashable], weights: Sequence[Tensor]) -> None:
        """Record checksums of weights that equal their rounded main params. Does not synchronize.

        Args:
            keys: one key for each weight.
            weights: plain tensors of any dtype.
        """
        self._sums.update(zip(keys, map(sum_of_bits, weights), strict=True))

    def knows(self, key: Hashable) -> bool:
        """True if :meth:`note` recorded a checksum for this key."""
        return key in self._sums

    def forget(self, key: Hashable | None = None) -> None:
        """Delete a checksum, so that the next step compares the weight with the main param.

        Args:
            key: key of the weight; None for all weights.
        """
        if key is None:
            self._sums.clear()
        else:
            self._sums.pop(key, None)

    def changed(self, keys: Sequence[Hashable], weights: Sequence[Tensor]) -> list[int]:
        """Return the indices of weights without a checksum, and of weights that differ from their
        checksum.

        Synchronizes once with each device.
        """
        equal: dict[torch.device, dict[int, Tensor]] = defaultdict(dict)
        for index, (key, weight) in enumerate(zip(keys, weights, strict=True)):
            if (then := self._sums.get(key)) is not None:
                equal[weight.device][index] = sum_of_bits(weight) == then.to(weight.device)
        unchanged: set[int] = set()
        for of_device in equal.values():
            unchanged.update(compress(of_device, torch.stack([*of_device.values()]).tolist()))
        return [index for index in range(len(keys)) if index not in unchanged]


def global_grad_norm(updates: Sequence[SlotUpdate]) -> float:
    """Return the L2 norm of all gradients, computed in FP64.

    The gradients may be on several devices. Collective if a gradient is sharded over ranks.
    """
    alike: dict[tuple[torch.device, Groups], list[Tensor]] = defaultdict(list)
    for update in updates:
        alike[update.grad.device, update.shard_groups].append(update.grad)
    total = 0.0
    for (device, groups), grads in alike.items():
        part = choose_backend("auto", device)[0].sum_of_squares(grads).sum()
        reduce_over(groups, part, "agreeing on the gradient norm")
        total += float(part)
    return math.sqrt(total)
