"""Two gloo processes; the second refuses a load."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mp_optim import checkpoint
from mp_optim.checkpoint import FlatShard
from support.as_rank import as_rank
from support.layouts import Layout, local, sharded, train, zero
from support.prints import differing, print_of

warnings.filterwarnings("ignore")


def layouts() -> list[tuple[Layout, Layout]]:
    place, ranks = sharded(0, DeviceMesh("cpu", [0, 1])), dist.group.WORLD
    blocks = Layout("sharded, 8bit", 2, place, form="8bit", fraction=0.5)
    return [
        (Layout("sharded", 2, place), blocks),
        (zero("zero1", 2, ranks), zero("zero1, 4bit", 2, ranks, form="4bit")),
    ]


def clear_moments(optimizer: Any, rank: int) -> None:
    for slot in optimizer.slots():
        state = optimizer.slot_state(slot)
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            if rank == 0 or not isinstance(moment, (DTensor, FlatShard)):
                local(moment).zero_()


def refused(source: Layout, target: Layout, folder: Path, rank: int) -> tuple[str, list[str]]:
    """Return the error of a load into ``target``, and the names of values that changed."""
    model, optimizer = source.build(1)
    train(model, optimizer, range(2))
    clear_moments(optimizer, rank)
    checkpoint.save(folder, model, optimizer)
    model, optimizer = target.build(2)
    train(model, optimizer, range(1))
    before = print_of(model, optimizer)
    try:
        checkpoint.load(folder, model, optimizer)
    except ValueError as error:
        return str(error), differing(before, print_of(model, optimizer))
    return "", []


class Scheduler:
    """A scheduler that refuses a saved step count above its limit."""

    def __init__(self, step: int, limit: int) -> None:
        self.step, self.limit = step, limit

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def check_state_dict(self, state: dict[str, int]) -> None:
        if state["step"] > self.limit:
            raise ValueError(f"step {state['step']} is too large")

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def refused_by_scheduler(layout: Layout, folder: Path, rank: int) -> tuple[str, list[str]]:
    """Return the error and changed names when the second rank's scheduler refuses."""
    model, optimizer = layout.build(1)
    train(model, optimizer, range(2))
    checkpoint.save(folder, model, optimizer, Scheduler(5, 9))
    model, optimizer = layout.build(2)
    train(model, optimizer, range(1))
    scheduler = Scheduler(3, 4 if rank == 1 else 9)
    before = {**print_of(model, optimizer), "scheduler": vars(scheduler).copy()}
    try:
        checkpoint.load(folder, model, optimizer, scheduler)
    except ValueError as error:
        after = {**print_of(model, optimizer), "scheduler": vars(scheduler)}
        return str(error), differing(before, after)
    return "", []


def main(folder: Path) -> Any:
    rank = dist.get_rank()
    torch.manual_seed(0)
    found = {}
    for number, (source, target) in enumerate(layouts()):
        found[target.name] = refused(source, target, folder / str(number), rank)
        path = folder / f"{number} scheduler"
        found[f"{target.name}: its scheduler"] = refused_by_scheduler(target, path, rank)
    return found


if __name__ == "__main__":
    as_rank(main)
