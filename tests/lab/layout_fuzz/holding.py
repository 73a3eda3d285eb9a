"""Which part of a model a rank holds, and which data it sees: whole numbers in, tensors out;
nothing is sent."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lab.layout_fuzz.case import Case, Layer, Layout, Param


class Place:
    """A rank's place in a layout."""

    def __init__(self, case: Case, layout: Layout, rank: int) -> None:
        self.case, self.layout, self.rank = case, layout, rank
        self.at: dict[str, int] = {}
        for name, size in reversed(layout.mesh):
            rank, self.at[name] = divmod(rank, size)

    def _data_rank(self, ep: int) -> int:
        found = 0
        for name, size in self.layout.mesh:
            if name not in ("tp", "pp"):
                found = found * size + (ep if name == "ep" else self.at[name])
        return found

    def streams(self, layer: Layer) -> list[int]:
        ranks = self.layout.data_ranks
        if ranks == 1:
            return list(range(self.case.streams))
        peers = self.layout.size("ep") if layer.is_expert else 1
        mine = [
            self._data_rank(ep) for ep in (range(peers) if peers > 1 else [self.at.get("ep", 0)])
        ]
        return [stream for stream in range(self.case.streams) if stream % ranks in mine]

    def factor(self, layer: Layer) -> float:
        if self.case.rough or self.layout.setting("grad_reduce_op") == "sum":
            return 1.0
        if self.layout.kind == "fsdp" and layer.is_expert:
            return float(self.layout.data_ranks // self.layout.size("ep"))
        return float(self.layout.data_ranks)

    def holds(self, layer: Layer) -> bool:
        """Whether any part of a layer is here."""
        if self.layout.kind != "copies":
            return True
        number = int(layer.name.partition(".")[2])
        if number % self.layout.size("pp") != self.at.get("pp", 0):
            return False
        return not layer.is_expert or number % self.layout.size("ep") == self.at.get("ep", 0)

    def cuts(self, param: Param) -> bool:
        """Whether tensor parallelism of plain tensors cuts a parameter."""
        size = self.layout.size("tp")
        return (
            self.layout.kind == "copies"
            and size > 1
            and param.splits is not None
            and param.shape[param.splits] % size == 0
        )

    def part(self, param: Param, whole: Tensor) -> Tensor:
        if not self.cuts(param):
            return whole
        assert param.splits is not None
        return torch.chunk(whole, self.layout.size("tp"), param.splits)[self.at["tp"]].clone()


def placements_of(layout: Layout, layer: Layer, param: Param) -> list[Placement]:
    draw = random.Random(f"{layout.placements} {layer.name}.{param.name}")
    choices: list[Placement] = [Replicate(), *map(Shard, range(len(param.shape)))]
    return [draw.choice(choices) for _ in layout.mesh]
