"""Two gloo processes: the job fails and restarts with the same store."""

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer


class OneStore(dist.Store):
    def __init__(self, life: int) -> None:
        super().__init__()
        port = int(os.environ["MASTER_PORT"])
        self.life, self.store = life, dist.TCPStore("localhost", port, is_master=False)

    def _key(self, key: str) -> str:
        return key if "mp_optim" in key else f"{self.life}/{key}"

    def set(self, key: str, value: Any) -> None:
        self.store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(self._key(key)))

    def add(self, key: str, value: int) -> int:
        return int(self.store.add(self._key(key), value))

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check([self._key(key) for key in keys]))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.store.wait([self._key(key) for key in keys], *timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return timedelta(minutes=1)


def live(life: int, late: float, timeout: float) -> str:
    rank = int(os.environ["RANK"])
    store, wait = OneStore(life), timedelta(seconds=timeout)  # No other object holds the store.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    model = nn.Linear(8, 8)
    config = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True)
    told = "no error"
    try:
        optimizer = get_megatron_optimizer(config, model)
        for step in range(3):
            if rank == 1 and step == 2:
                time.sleep(late)
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        told = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return told


def main(folder: str) -> None:
    told = [live(1, late=4.0, timeout=2.0), live(2, late=2.5, timeout=60.0)]
    torch.save(told, f"{folder}/rank{os.environ['RANK']}.pt")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads of the failed job may wait for a long time.


if __name__ == "__main__":
    main(sys.argv[1])
