"""Two gloo processes train with FSDP2, and move state by hand."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mp_optim import MegatronOptimizer, get_megatron_optimizer
from support.as_rank import as_rank
from support.models import DTYPES, TinyMoE, config_for, is_expert, train
from support.moved_by_hand import HELPERS


def build_sharded(
    precision: str, fraction: float, policy: OffloadPolicy | None = None, **settings: Any
) -> tuple[TinyMoE, MegatronOptimizer]:
    model = TinyMoE(DTYPES[precision.split("-")[0]])
    mixed = model.dense.dtype != model.scale.dtype  # FSDP2 shards one dtype at a time.
    ignored = {model.scale} if mixed else set()
    fully_shard(model, ignored_params=ignored, offload_policy=policy or OffloadPolicy())
    return model, get_megatron_optimizer(
        config_for(precision, fraction, **settings), model, expert_predicate=is_expert
    )


def with_cpu_offload_policy() -> list[bool]:
    found = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        model, optimizer = build_sharded("bf16", 0.5, policy)
        train(model, optimizer, 3)
        found.append([whole(main) for _, main in optimizer.named_main_params()])
    return list(map(torch.equal, *found))


HANDS = ["fp32", "bf16", "bf16-remainder", "bf16-8bit", "bf16-4bit"]


def moved_by_hand(form: str) -> list[str]:
    def trained(by_hand: bool) -> dict[str, Tensor]:
        model, optimizer = build_sharded(form, 0.5)
        train(model, optimizer, 2)
        for helper in HELPERS.values() if by_hand else ():
            helper(optimizer, torch.device("cpu"))
        zeros = {}
        for param, state in optimizer.state.items():
            assert optimizer.state[param] is state
            zeros[param] = {**state, "exp_avg": torch.zeros_like(state["exp_avg"])}
        if not by_hand:
            optimizer.state = zeros
        for param, state in zeros.items() if by_hand else ():
            value = state["exp_avg"]
            is_cut = isinstance(value, DTensor) and param.dim() == 2
            optimizer.state[param]["exp_avg"] = value.to_local() if is_cut else value
        train(model, optimizer, 2, start=2)
        return {name: whole(main) for name, main in optimizer.named_main_params()}

    one, other = trained(True), trained(False)
    return [name for name, main in one.items() if not torch.equal(main, other[name])]


def stays_where_it_is() -> bool:
    _, optimizer = build_sharded("bf16", 0.0)
    kept = optimizer.state_of(optimizer.slots()[0]).live()["exp_avg"]
    param = optimizer.param_groups[0]["params"][0]
    with mock.patch.object(type(param.device_mesh), "device_type", "cuda"):
        shown = optimizer.state[param]["exp_avg"]
    local = shown.to_local()
    same = local.data_ptr() == kept.data_ptr() and shown.shape == param.shape
    return same and shown.placements == param.placements and local.device.type == "cpu"


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def main(directory: Path) -> Any:
    return {
        "with_policy": with_cpu_offload_policy(),
        "hands": {form: moved_by_hand(form) for form in HANDS},
        "stays": stays_where_it_is(),
    }


if __name__ == "__main__":
    as_rank(main)
