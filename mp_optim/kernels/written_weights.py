"""Checksums of the model's weights, where these are not compared with their main params in a step.

A kernel compares both where they are on one device. A main param on the host, or a weight that is
quantized, would have to be copied first. So the weight's device adds up its bits after a step and
before the next one, and main param and weight are compared only if the sums differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from mp_optim.kernels.checksums import sum_of_bits


class WrittenWeights:
    """Checksums of weights as the last step left them, on the devices of the weights."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, Tensor] = {}

    def note(self, keys: Sequence[Hashable], weights: Sequence[Tensor]) -> None:
        """Remember weights as they are: equal to their main params, rounded. Waits for no device.

        Args:
            keys: one for each weight. weights: plain tensors of any dtype.
        """
        self._sums.update(zip(keys, map(sum_of_bits, weights), strict=True))

    def knows(self, key: Hashable) -> bool:
        """Whether a weight's checksum was noted."""
        return key in self._sums

    def forget(self, key: Hashable | None = None) -> None:
        """Compare a weight, or all, with the main param next time: it may have changed."""
        if key is None:
            self._sums.clear()
        else:
            self._sums.pop(key, None)

    def changed(self, keys: Sequence[Hashable], weights: Sequence[Tensor]) -> list[int]:
        """Return the indices of weights that have other bits than noted, or were not noted.

        Waits once for each device.
        """
        before = [self._sums.get(key) for key in keys]
        known = [index for index, sums in enumerate(before) if sums is not None]
        equal: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index in known:
            weight, then = weights[index], before[index]
            assert then is not None
            same = sum_of_bits(weight) == then.to(weight.device)
            equal.setdefault(weight.device, []).append((index, same))
        unchanged: set[int] = set()
        for pairs in equal.values():
            flags = torch.stack([same for _, same in pairs]).tolist()
            unchanged.update(index for (index, _), same in zip(pairs, flags, strict=True) if same)
        return [index for index in range(len(keys)) if index not in unchanged]
