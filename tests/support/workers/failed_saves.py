"""Three gloo processes: saves fail on some ranks, or because one rank is late."""

import os
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer
from mp_optim.checkpoint import writing
from support.as_rank import error_of

RANKS, TIMEOUT = 3, 4.0


def meet(folder: Path, rank: int, where: str) -> None:
    """Wait for the other ranks by files, without a process group."""
    (folder / f"{where}{rank}").touch()
    while len(list(folder.glob(f"{where}[0-9]"))) < RANKS:
        time.sleep(0.05)


def main(directory: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    _set_pg_timeout(timedelta(seconds=TIMEOUT))
    rank, folder = dist.get_rank(), Path(directory)
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), model)

    def save() -> None:
        checkpoint.save(folder / "saved", model, optimizer)

    found: dict[str, Any] = {}
    write = writing.Writing.write

    def full(self: Any) -> Any:
        if rank > 0:
            raise OSError(28, f"No space left on disk {rank}")
        return write(self)

    meet(folder, rank, "begin")
    writing.Writing.write = full
    found["two fail"] = error_of(save)
    writing.Writing.write = write
    meet(folder, rank, "late")
    time.sleep(TIMEOUT + 1.0 if rank == 2 else 0.0)
    found["one is late"] = error_of(save)
    meet(folder, rank, "again")
    found["again"] = error_of(save)
    other = nn.Linear(8, 8)
    both = other, get_megatron_optimizer(OptimizerConfig(lr=1e-3), other)
    go = threading.Event()

    def held(self: Any) -> Any:
        assert "first" not in str(self.folder) or go.wait(60)
        return write(self)

    writing.Writing.write = held
    first = checkpoint.save(folder / "first", model, optimizer, asynchronous=True)
    second = checkpoint.save(folder / "second", *both, asynchronous=True)
    found["side by side"] = [second.wait(60).name, first.done()]
    checkpoint.load(folder / "second", *both)
    go.set()
    found["side by side"] += [first.wait(60).name]
    torch.save(found, folder / f"rank{rank}.pt")
    meet(folder, rank, "end")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a regular exit of the interpreter.


if __name__ == "__main__":
    main(sys.argv[1])
