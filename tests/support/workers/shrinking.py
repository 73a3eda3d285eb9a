"""Three gloo processes; two ranks restart, then one, with their old optimizers."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer
from support.as_rank import error_of

ZERO = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "optim": ZERO,
    "optim_grads": {**ZERO, "data_parallel_sharding_strategy": "optim_grads"},
    "layer-wise": {**ZERO, "use_layer_wise_distributed_optimizer": True},
    "no_shard": {**ZERO, "data_parallel_sharding_strategy": "no_shard"},
    "fsdp2": {},
}


def lines_of_the_page() -> dict[str, Any]:
    page = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def built(layout: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).bfloat16()
    if layout == "fsdp2":
        fully_shard(model)
    config = OptimizerConfig(lr=1e-3, bf16=True, **LAYOUTS[layout])
    optimizer = get_megatron_optimizer(config, model)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8).bfloat16()).float().sum().backward()
    optimizer.step()


def main(folder: Path) -> None:
    rank, found = int(os.environ["RANK"]), {}
    begin_again = lines_of_the_page()["begin_again"]
    begin_again(life=1)
    kept = {layout: built(layout) for layout in LAYOUTS}
    for layout, both in kept.items():
        checkpoint.save(folder / layout, *both)
    for size in (2, 1):
        dist.barrier()
        if rank >= size:
            dist.destroy_process_group()
            break
        os.environ["WORLD_SIZE"] = str(size)
        begin_again(life=4 - size)
        for layout, both in kept.items():
            saving = error_of(lambda both=both, name=layout: checkpoint.save(folder / name, *both))
            found[f"{layout} {size}"] = saving
    if rank == 0:
        for layout, both in kept.items():
            found[f"{layout} step"] = error_of(lambda both=both: step(*both))
        (folder / "found.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
