"""A trainer that publishes its weights, and comparisons of published weights."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mp_optim import WeightDelta, checkpoint
from mp_optim.core.weight_delta import WeightPatch
from support.models import build


def differing(one: Tensor, other: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.contiguous().view(integers) != other.contiguous().view(integers)


class PublishedRun:
    """A trainer in fp16 that changes random weights: by steps, by skipped steps and by writes of
    other code. It publishes the weights as two parts, as two ranks would.

    Args:
        seed: of all random choices.
        folder: for checkpoints.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self._random, self._folder = random.Random(seed), folder / "checkpoint"
        self._generator = torch.Generator().manual_seed(seed)
        self._start(seed)
        self.skipped = 0

    def _start(self, seed: int) -> None:
        self.model, self._optimizer = build("fp16", seed=seed, lr=1e-4)
        self._optimizer.track_changes()

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def train(self) -> None:
        """Step at most three times, skip each step with a probability of 1/4, and sometimes write a
        weight in place."""
        params = [*self.model.parameters()]
        for _ in range(self._random.randrange(4)):
            for param in params:
                param.grad = torch.randn(param.shape, generator=self._generator).to(param.dtype)
            if self._random.random() < 0.25:
                params[0].grad[0, 0] = float("inf")
            self.skipped += not self._optimizer.step().success
        if self._random.random() < 0.2:
            with torch.no_grad():
                self._random.choice(params).mul_(-1)

    def resume(self) -> None:
        """Continue in a new optimizer from a checkpoint. Its next publication has to be full."""
        checkpoint.save(self._folder, self.model, self._optimizer)
        self._start(1)
        checkpoint.load(self._folder, self.model, self._optimizer)
        self._optimizer.track_changes()

    def publish(self, full: bool = False) -> list[WeightDelta]:
        delta = self._optimizer.changed_weights(full=full)
        split: tuple[list[WeightPatch], list[WeightPatch]] = ([], [])
        for patch in delta.patches:
            is_second = torch.rand(patch.values.numel(), generator=self._generator) < 0.5
            for patches, mine in zip(split, (~is_second, is_second), strict=True):
                values, indices = patch.values[mine], patch.positions()[mine]
                if values.numel():
                    patches.append(patch._replace(values=values, indices=indices))
        return [
            replace(delta, part=part, parts=2, patches=tuple(patches))
            for part, patches in enumerate(split)
        ]


def assert_equal_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert [*found] == [*expected]
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
        assert not differing(found[name], tensor).any(), name
