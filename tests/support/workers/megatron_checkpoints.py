"""Two gloo processes that save and resume a Megatron-core GPT, with ZeRO and tensor parallelism."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from mp_optim.apps import megatron
from mp_optim.core.flat_shard import FlatShard
from support import megatron_gpt as gpt

BUCKETS = "dp_reshardable"


def built(distributed: bool) -> tuple[nn.Module, Any]:
    model = gpt.gpt(distributed=distributed)
    config = gpt.optimizer_config(use_distributed_optimizer=distributed)
    return model, megatron.get_megatron_optimizer(config, [model])


def of_this_rank(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    split = {
        name.removeprefix("module."): param.partition_dim
        for name, param in model.named_parameters()
        if getattr(param, "tensor_model_parallel", False)
    }
    state: dict[str, Any] = {}
    for slot in optimizer.slots():
        name = optimizer.slot_name(slot).removeprefix("module.")
        for key, value in optimizer.full_slot_state(slot).items():
            shard = isinstance(value, FlatShard)
            part = (value.start, value.local) if shard else (split.get(name), value)
            state[f"{name}.{key}"] = part
    return state


def distributed_optimizer(folder: Path) -> None:
    rank = dist.get_rank()
    model, optimizer = built(distributed=True)
    gpt.train(model, optimizer, range(3))
    metadata = {"distrib_optim_sharding_type": BUCKETS}
    (folder / "shared").mkdir(exist_ok=True)
    dist.barrier()
    gpt.save(folder / "shared", model, optimizer, metadata)
    assert metadata["distrib_optim_sharding_type"] == "fully_reshardable"
    torch.save(of_this_rank(model, optimizer), folder / f"shared{rank}.pt")
    legacy = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(legacy, folder / "legacy.pt")
    optimizer.save_parameter_state(str(folder / "parameter_state.pt"))
    expected = gpt.train(model, optimizer, range(3, 6))

    model, optimizer = built(distributed=True)
    gpt.load(folder / "shared", model, optimizer)
    assert gpt.train(model, optimizer, range(3, 6)) == expected

    model, optimizer = built(distributed=True)
    loaded = torch.load(folder / "legacy.pt", weights_only=True)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    optimizer.load_parameter_state(str(folder / "parameter_state.pt"))
    assert gpt.train(model, optimizer, range(3, 6)) == expected


def tensor_parallel(folder: Path) -> None:
    rank = dist.get_rank()
    model, optimizer = built(distributed=False)
    gpt.train(model, optimizer, range(3))
    (folder / "split").mkdir(exist_ok=True)
    dist.barrier()
    gpt.save(folder / "split", model, optimizer, {})
    torch.save(of_this_rank(model, optimizer), folder / f"split{rank}.pt")
    expected = gpt.train(model, optimizer, range(3, 6))
    model, optimizer = built(distributed=False)
    gpt.load(folder / "split", model, optimizer)
    assert gpt.train(model, optimizer, range(3, 6)) == expected


def main() -> None:
    folder = Path(sys.argv[1])
    with pytest.MonkeyPatch.context() as patch:
        gpt.without_cuda(patch)
        gpt.initialize()
        distributed_optimizer(folder)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        tensor_parallel(folder)
    gpt.finish()


if __name__ == "__main__":
    main()
