"""The start of a worker program: one rank of a gloo job that saves its result."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def as_rank(main: Callable[[Path], object]) -> None:
    """Join the job, call ``main`` with the result folder, and save its return value for
    ``support.launch.results_of_ranks``."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.save(main(folder), folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a regular exit of the interpreter.


def error_of(call: Callable[[], object]) -> str:
    """Return the error of a call, with its type, or "no error"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
