"""Four processes: some leave. The remaining ranks write the errors that they get.

One process imports torch and forks the ranks of all scenarios, which run concurrently.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# torch.optim imports it at its first use, which takes a second.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard

from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.process_groups import missing_ranks
from mp_optim.process_groups.missing_ranks import all_gather

RANKS = 4
TIMEOUT = 4.0
PATIENCE = missing_ranks._PATIENCE = 5.0


@dataclass(frozen=True)
class Scenario:
    where: str
    how: str = "kill"
    gone: tuple[int, ...] = (3,)
    busy: int | None = None

    @property
    def name(self) -> str:
        gone = "+".join(map(str, self.gone))
        return f"{self.where}-{self.how}-{gone}{'-busy' if self.busy is not None else ''}"


SCENARIOS = [
    Scenario("optim", gone=(0,)),
    Scenario("optim", gone=(1, 2)),
    Scenario("optim_grads", "raise"),
    Scenario("fsdp2"),
    Scenario("optim", "stop"),
    Scenario("optim", "stop", gone=(0,), busy=1),  # The other ranks have ended when rank 1 fails.
    Scenario("objects", busy=1),
]
DISAGREE = Scenario("fsdp2", "disagree", gone=())
"""Rank 1 sets another learning rate; then all ranks leave at once."""


def stepping(strategy: str, other_settings: bool = False) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    if strategy == "fsdp2":
        fully_shard(model)
        config = OptimizerConfig(lr=1e-3)
    else:
        config = OptimizerConfig(
            lr=1e-3,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=False,
        )
    optimizer = get_megatron_optimizer(config, model)
    if other_settings:
        optimizer.param_groups[0]["lr"] = 1e-2
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        if strategy == "optim_grads":
            optimizer.step()
    if strategy != "optim_grads":
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
    if strategy == "optim_grads":  # optim_grads reduces gradients in backward.
        optimizer.zero_grad()
        return lambda: model(torch.ones(2, 16)).sum().backward() or optimizer.step()
    return optimizer.step


def objects() -> Callable[[], Any]:
    """Gather objects over a Gloo group, as a checkpoint does."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))

    def gather() -> list[Any]:
        return all_gather(group, "saving", dist.get_rank())

    gather()
    return gather


def leave(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "raise":
        raise ValueError("a bug in the training loop")
    sys.exit(0)


def run(scenario: Scenario, rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    if scenario == DISAGREE:
        dist.barrier()
        write(scenario, rank, folder, lambda: stepping("fsdp2", rank == 1))
        os._exit(0)
    act = objects() if scenario.where == "objects" else stepping(scenario.where)
    dist.barrier()
    _set_pg_timeout(timedelta(seconds=TIMEOUT))
    if rank in scenario.gone:
        leave(scenario.how)
    if rank == scenario.busy and scenario.how == "stop":
        outlast(scenario, rank, folder)
    elif rank == scenario.busy:
        time.sleep(2.5)
    write(scenario, rank, folder, act)
    time.sleep(1.0)  # A program that handles the error does not end at once.
    os._exit(0)


def outlast(scenario: Scenario, rank: int, folder: Path) -> None:
    """Wait until the other healthy ranks have ended."""
    others = {*range(RANKS)} - {rank, *scenario.gone}
    while not all(written(scenario, other, folder).exists() for other in others):
        time.sleep(0.1)
    time.sleep(2.5)


def written(scenario: Scenario, rank: int, folder: Path) -> Path:
    return folder / f"{scenario.name}-{rank}.json"


def write(scenario: Scenario, rank: int, folder: Path, act: Callable[[], object]) -> None:
    """Write the error that ``act`` raises on this rank, and its duration in seconds."""
    began, told = time.monotonic(), "no error"
    try:
        act()
    except (RuntimeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
    found = {"told": told, "seconds": time.monotonic() - began}
    written(scenario, rank, folder).write_text(json.dumps(found))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def start(scenario: Scenario, folder: Path) -> dict[int, int]:
    port, children = free_port(), {}
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                run(scenario, rank, port, folder)
            finally:
                os._exit(1)
        children[pid] = rank
    return children


def main(folder: Path, scenarios: list[Scenario], together: int) -> None:
    for first in range(0, len(scenarios), together):
        groups = [
            (scenario, start(scenario, folder)) for scenario in scenarios[first : first + together]
        ]
        for scenario, children in groups:
            for pid, rank in children.items():
                if rank not in scenario.gone:
                    os.waitpid(pid, 0)
            for pid, rank in children.items():
                if rank in scenario.gone:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        [scenario for scenario in (*SCENARIOS, DISAGREE) if sys.argv[2] in scenario.name],
        together=8,
    )
