"""Two ranks skip steps: together, as each of several layouts shares what is measured, or each
alone. Each saves its lines of the log, by layout."""

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mp_optim import OptimizerConfig, ProcessGroups, get_megatron_optimizer


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def built(module: nn.Module, **arguments: Any) -> tuple[nn.Module, Any]:
    settings = arguments.pop("settings", {})
    config = OptimizerConfig(lr=0.1, **settings)
    return module, get_megatron_optimizer(config, module, **arguments)


def stages() -> tuple[nn.Module, Any]:
    """Each holds other parameters of one model."""
    part = nn.Sequential(model()[dist.get_rank()])
    groups = ProcessGroups(grad_stats=dist.group.WORLD)
    return built(part, process_groups=groups)


def zero(strategy: str) -> Callable[[], tuple[nn.Module, Any]]:
    settings = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": strategy}
    return lambda: built(model(), settings=settings)


def fsdp() -> tuple[nn.Module, Any]:
    return built(fully_shard(model(), mesh=init_device_mesh("cpu", (2,))))


def partly_fsdp() -> tuple[nn.Module, Any]:
    """What is not split is each rank's own, as far as the optimizer can know."""
    module = model()
    fully_shard(module[0], mesh=init_device_mesh("cpu", (2,)))
    return built(module)


LAYOUTS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "alone": lambda: built(model()),
    "alone, in part": partly_fsdp,
    "stages": stages,
    **{strategy: zero(strategy) for strategy in ("no_shard", "optim", "optim_grads")},
    "fsdp": fsdp,
}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    log = logging.getLogger("mp_optim.mixed_precision")
    log.setLevel(logging.INFO)
    found = {}
    for name, build in LAYOUTS.items():
        handler = Lines()
        log.addHandler(handler)
        module, optimizer = build()
        (module(torch.ones(2, 4)).sum() * torch.nan).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert optimizer.step().reason.endswith("hold an inf or nan")
        log.removeHandler(handler)
        found[name] = handler.lines
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
