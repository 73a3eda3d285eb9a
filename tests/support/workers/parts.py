"""Three gloo processes: models with several optimizers, whole parameters on one rank, and
disagreements."""

import hashlib
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mp_optim import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from mp_optim.apps.megatron.adapter import MegatronAdapter
from mp_optim.zero.buckets import plan_whole
from mp_optim.zero.collectives import start_reduction
from support.as_rank import as_rank, error_of

FOLDER = ""
RANKS = 3
OTHERWISE = [
    ("zero_grad", "optim_grads"),
    ("frozen", "optim_grads"),
    ("frozen", "optim"),
    ("frozen", "no_shard"),
    ("count", "optim"),
    ("clip_grad", "no_shard"),
    ("clip_grad", "optim"),
    ("clip_grad", "optim_grads"),
    ("log_num_zeros_in_grad", "optim"),
    ("log_param_grad_norms", "optim"),
    ("nothing", "optim_grads"),
]


def digest(model: nn.Module) -> str:
    data = b"".join(p.detach().float().contiguous().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()


def buffer_of_whole_parameters() -> float:
    model = nn.ParameterDict({"table": torch.ones(3000, 16), "layer": torch.ones(16, 16)})
    config = OptimizerConfig(
        lr=1e-2, optimizer="muon", clip_grad=0.0, use_layer_wise_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(config, model)
    size = sum(param.numel() for param in model.values())
    assert optimizer.slots()
    return float(model["table"].untyped_storage().nbytes() / (4 * size))


def largest_exchange(numels: list[int]) -> float:
    moved = []
    real = dist.all_to_all_single

    def counting(output: Tensor, given: Tensor, *rest: Any, **more: Any) -> Any:
        moved.append(output.numel() + (0 if given.numel() == total * 4 else given.numel()))
        return real(output, given, *rest, **more)

    (plan,) = plan_whole(numels, RANKS)
    total = plan.numel
    grads = torch.ones(total)
    first, last = plan.owned(dist.get_rank())
    dist.all_to_all_single = counting
    try:
        start_reduction(
            grads,
            grads[first:last],
            dist.group.WORLD,
            plan.bounds,
            divisor=1,
            exchange=True,
            add=False,
        ).wait()
    finally:
        dist.all_to_all_single = real
    assert bool((grads[first:last] == RANKS).all())
    return max(moved) / (total * 4)


def built(strategy: str) -> tuple[nn.Module, MegatronOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    config = OptimizerConfig(
        lr=1e-2, use_distributed_optimizer=True, data_parallel_sharding_strategy=strategy
    )
    return model, get_megatron_optimizer(config, model)


def step_otherwise(what: str, strategy: str) -> dict[str, Any]:
    odd = dist.get_rank() == 1
    model, optimizer = built(strategy)
    for step in range(2):
        if what != "zero_grad" or step == 0 or not odd:
            optimizer.zero_grad()
        if what == "count" and step == 1 and odd:
            optimizer.counts.steps += 1  # The other ranks have not taken this step.
        if what == "frozen" and step == 1 and odd:
            model[2].weight.requires_grad_(False)
        if what in OTHER_SETTINGS and step == 1 and odd:
            setattr(optimizer.config, what, OTHER_SETTINGS[what])
        before = digest(model)
        model(torch.ones(3, 8)).square().mean().backward()
        told = error_of(optimizer.step)
    return {"told": told, "kept": before == digest(model)}


OTHER_SETTINGS: dict[str, Any] = {
    "clip_grad": 2.0,
    "ema_decay": 0.9,
    "grad_norm_skip_threshold": 5.0,
    "log_num_zeros_in_grad": True,
    "log_param_grad_norms": 3,
    "skip_step_sigma_factor": 3.0,
}
"""Config fields with the value that one rank sets."""


def fsdp_disagrees(what: str) -> dict[str, Any]:
    what, _, how = what.partition(", ")
    odd = dist.get_rank() == RANKS - 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    settings: dict[str, Any] = {"lr": 1e-2, "clip_grad": 1.0}
    if what in OTHER_SETTINGS and odd:
        settings[what] = OTHER_SETTINGS[what]
    if what == "path":  # Each rank has its own state folder.
        folder = Path(FOLDER, f"state of {dist.get_rank()}")
        folder.mkdir()
        settings |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
        settings["optimizer_state_path"] = str(folder)
    optimizer = get_megatron_optimizer(OptimizerConfig(**settings), model)
    take = optimizer.step if how != "in parts" else partial(_in_parts, MegatronAdapter(optimizer))
    seconds, told = 0.0, []
    for step in range(3):
        optimizer.zero_grad()
        if what == "lr" and step == 1 and odd:
            optimizer.param_groups[0]["lr"] = 0.5
        if what == "lr" and step == 2 and odd:
            optimizer.param_groups[0]["lr"] = 1e-2
        if what == "gradient" and odd:
            model[2].bias.requires_grad_(False)
        model(torch.ones(3, 8)).square().mean().backward() if what != "gradient" else _give(model)
        began, before = time.monotonic(), _local(model)
        told.append(error_of(take))
        seconds = max(seconds, time.monotonic() - began)
        if told[-1] != "no error" and before != _local(model):
            told.append("and was stepped all the same")
    return {"told": told, "seconds": seconds}


def _in_parts(face: MegatronAdapter) -> None:
    face.prepare_grads()
    face.clip_grad_norm(1.0)
    face.step_with_ready_grads()


def _give(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None


def _local(model: nn.Module) -> list[list[float]]:
    return [param.to_local().reshape(-1).tolist() for param in model.parameters()]


def main(directory: Path) -> Any:
    warnings.simplefilter("ignore")
    global FOLDER
    FOLDER = directory
    found: dict[str, Any] = {}
    found["otherwise"] = {
        (what, strategy): step_otherwise(what, strategy) for what, strategy in OTHERWISE
    }
    found["fsdp"] = {
        what: fsdp_disagrees(what)
        for what in ("nothing", "path", "lr", "lr, in parts", "gradient", *OTHER_SETTINGS)
    }
    found["buffer"] = buffer_of_whole_parameters()
    found["exchange"] = [
        largest_exchange(sizes) for sizes in ([100_000, 300, 5], [5000] * 7, [9000])
    ]
    return found


if __name__ == "__main__":
    as_rank(main)
