"""Two gloo processes train with FSDP2, and agree although they hold different parameters."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mp_optim import MegatronOptimizer, ProcessGroups, get_megatron_optimizer
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


def beside_fsdps_offloading() -> list[bool]:
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


def agree_between_ranks() -> dict[str, object]:
    rank, world = dist.get_rank(), dist.group.WORLD
    model = nn.ParameterDict(
        {"own": nn.Parameter(torch.zeros(1)), "twin": nn.Parameter(torch.zeros(1))}
    )
    model["own"].tensor_model_parallel = True
    optimizer = get_megatron_optimizer(
        config_for("fp32", clip_grad=0.0),
        model,
        process_groups=ProcessGroups(grad_stats=world, tp=world),
    )
    model["own"].grad, model["twin"].grad = (
        torch.full((1,), [2.0, 3.0][rank]),
        torch.full((1,), 6.0),
    )
    norm = optimizer.step().grad_norm
    before = model["own"].detach().clone()
    model["own"].grad = torch.full((1,), [1.0, float("nan")][rank])
    skipped = not optimizer.step().success
    return {"norm": norm, "skipped": skipped and torch.equal(before, model["own"].detach())}


def experts_on_one_rank() -> dict[str, object]:
    rank, world = dist.get_rank(), dist.group.WORLD
    model = nn.ParameterDict({"dense" if rank == 0 else "expert": nn.Parameter(torch.zeros(1))})
    optimizer = get_megatron_optimizer(
        config_for("fp32"),
        model,
        expert_predicate=lambda p, n: rank == 1,
        process_groups=ProcessGroups(grad_stats=world, expert_grad_stats=world),
    )
    for param in model.values():
        param.grad = torch.full((1,), [3.0, 4.0][rank])
    return {
        "norm": optimizer.step().grad_norm,
        "stubs": [o.is_stub_optimizer for o in optimizer.chained_optimizers],
    }


def main(directory: Path) -> Any:
    result: dict[str, Any] = {}
    result["agreement"] = agree_between_ranks()
    result["experts"] = experts_on_one_rank()
    result["beside_fsdps"] = beside_fsdps_offloading()
    result["hands"] = {form: moved_by_hand(form) for form in HANDS}
    result["stays"] = stays_where_it_is()
    return result


if __name__ == "__main__":
    as_rank(main)
