"""Four gloo processes save tensors with torch.distributed.checkpoint in every layout, and load them
into every other layout."""

import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mp_optim.checkpoint import FlatShard
from support.as_rank import as_rank

warnings.filterwarnings("ignore")

SHAPES = {
    "matrix": (7, 5),
    "cube": (3, 4, 5),
    "scalar": (),
    "one": (1,),
    "empty": (0, 3),
    "vector": (10,),
    "thin": (1, 9),
    "four": (2, 3, 1, 4),
}
DTYPES = (torch.float32, torch.bfloat16, torch.int16)


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(-1000, 1000, shape, generator=generator).to(dtype)
        for (name, shape), dtype in zip(SHAPES.items(), itertools.cycle(DTYPES))
    }


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: int
    place: Callable[[str, Tensor, int], Tensor]


def flat(ranks: int, seed: int, copies: int = 1) -> Layout:
    """Cut a tensor at random positions; ``copies`` neighbouring ranks hold the same range."""

    def place(name: str, tensor: Tensor, rank: int) -> Tensor:
        chance = random.Random(f"{seed} {name}")
        cuts = sorted(chance.randint(0, tensor.numel()) for _ in range(ranks // copies - 1))
        start, end = ([0, *cuts, tensor.numel()][rank // copies + i] for i in range(2))
        return FlatShard(tensor.reshape(-1)[start:end].clone(), tensor.shape, start)

    return Layout(f"flat{ranks}/{copies}", ranks, place)


def meshed(ranks: int, dim: int | None) -> Layout:
    mesh = DeviceMesh("cpu", list(range(ranks)))

    def place(name: str, tensor: Tensor, rank: int) -> Tensor:
        placement = Shard(dim) if dim is not None and tensor.dim() > dim else Replicate()
        return distribute_tensor(tensor.clone(), mesh, [placement], src_data_rank=None)

    return Layout(f"{'replicate' if dim is None else f'shard{dim}'}-{ranks}", ranks, place)


def layouts() -> list[Layout]:
    return [
        Layout("plain", 1, lambda name, tensor, rank: tensor.clone()),
        flat(2, 1),
        flat(3, 2),
        flat(4, 3),
        flat(4, 4, copies=2),
        meshed(2, None),
        meshed(3, 0),
        meshed(2, 1),
    ]


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.local if isinstance(tensor, FlatShard) else tensor
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(folder: Path) -> Any:
    rank = dist.get_rank()
    groups = {size: dist.new_group(list(range(size))) for size in range(1, 5)}
    wrong, cases = [], 0
    every = layouts()
    for layout in every:
        if rank < layout.ranks:
            held = {name: layout.place(name, tensor, rank) for name, tensor in tensors().items()}
            dcp.save(
                held, checkpoint_id=f"{folder}/{layout.name}", process_group=groups[layout.ranks]
            )
    dist.barrier()
    for saved, layout in itertools.product(every, every):
        if rank < layout.ranks:
            expected = {
                name: layout.place(name, tensor, rank) for name, tensor in tensors().items()
            }
            found = {
                name: layout.place(name, torch.full_like(tensor, -7), rank)
                for name, tensor in tensors().items()
            }
            kept = {name: local(tensor) for name, tensor in found.items()}
            dcp.load(
                found, checkpoint_id=f"{folder}/{saved.name}", process_group=groups[layout.ranks]
            )
            wrong += [
                (saved.name, layout.name, name)
                for name, tensor in expected.items()
                if not torch.equal(local(tensor), kept[name])
            ]  # The load writes into the given memory.
            cases += 1
        for name in ("matrix", "scalar"):
            if rank < layout.ranks and layout.name.startswith("flat"):
                full = found[name].full_tensor(groups[layout.ranks])
                wrong += (
                    []
                    if torch.equal(full, tensors()[name])
                    else [(saved.name, layout.name, f"full {name}")]
                )
    return {"wrong": wrong, "cases": cases}


if __name__ == "__main__":
    as_rank(main)
