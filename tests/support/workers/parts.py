"""Three gloo processes: models of several parts, whole parameters on one rank, disagreement."""

import hashlib
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mp_optim import (
    MegatronOptimizer,
    OptimizerConfig,
    ProcessGroups,
    checkpoint,
    get_megatron_optimizer,
)
from mp_optim.apps.megatron.adapter import MegatronAdapter
from mp_optim.zero.buckets import plan_whole
from mp_optim.zero.grad_reducer import start_reduction

FOLDER = ""
RANKS = 3
PROGRAMS = 6
STEPS = 3
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


class Routed(nn.Module):
    """Layers with an expert each; which experts are used is the caller's choice."""

    def __init__(self, widths: list[int], mixed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(widths))
        self.dense, self.experts = nn.ModuleList(), nn.ModuleList()
        for width in widths:
            self.dense.append(nn.Linear(16, 16, bias=mixed))
            self.experts.append(nn.Linear(16, width, bias=False))
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.3
        if mixed:
            self.experts.bfloat16()

    def forward(self, x: Tensor, used: set[int]) -> Tensor:
        for index, (dense, expert) in enumerate(zip(self.dense, self.experts, strict=True)):
            x = torch.tanh(dense(x))
            if index in used:
                x = x + expert(x.to(expert.weight.dtype)).float().mean(-1, keepdim=True)
        return x.square().mean()


def digest(model: nn.Module) -> str:
    data = b"".join(p.detach().float().contiguous().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()


def program(
    seed: int, groups: dict[str, dist.ProcessGroup], plain: bool
) -> tuple[str, list[float]]:
    """Train a random model; ``plain`` without anything that overlaps or is sharded."""
    chance = random.Random(seed)
    widths = [chance.choice((4, 16, 40)) for _ in range(chance.randint(2, 5))]
    mixed, apart = chance.random() < 0.3, chance.random() < 0.4
    strategy, overlap = chance.choice(
        (("optim", True), ("optim_grads", False), ("optim_grads", True), ("no_shard", True))
    )
    settings = {
        "bucket_size": chance.choice((None, 256, 600)),
        "overlap_grad_reduce": overlap,
        "data_parallel_sharding_strategy": strategy,
    }
    passes = chance.choice((1, 1, 2))
    if plain:
        settings |= {"overlap_grad_reduce": False, "data_parallel_sharding_strategy": "no_shard"}
    model = Routed(widths, mixed)
    ranks = (
        ProcessGroups(
            dp=groups["dp"], expert_dp=groups["expert_dp"], expert_grad_stats=groups["alone"]
        )
        if apart
        else ProcessGroups(dp=groups["dp"])
    )
    config = OptimizerConfig(
        lr=1e-2, use_distributed_optimizer=True, clip_grad=0.0, bf16=mixed, **settings
    )
    optimizer: Any = get_megatron_optimizer(
        config,
        model,
        process_groups=ranks,
        expert_predicate=lambda p, name: name.startswith("experts"),
    )
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(passes):
            mine = random.Random(f"{seed} {step} {turn} {dist.get_rank()}")
            used = {index for index in range(len(widths)) if mine.random() < 0.5}
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(mine.randrange(2**31)))
            with optimizer.no_sync() if turn < passes - 1 else torch.enable_grad():
                if mine.random() < 0.9:  # else this rank has no backward pass at all
                    model(x, used).backward()
        norms.append(optimizer.step().grad_norm)
    return digest(model), norms


# -- whole parameters on one rank ------------------------------------------------------------------


class Uneven(nn.Module):
    """One matrix is most of the model; one is empty, and there are stacks, vectors and a number."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * 0.3)

        self.table = weight((20, 3000)[seed % 2], 16)
        self.layers = nn.ParameterList(weight(16, 16) for _ in range(chance.randint(1, 5)))
        self.stack, self.bias, self.scale = weight(2, 16, 24), weight(16), weight()
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table[tokens] * self.frozen
        for layer in self.layers:
            x = torch.tanh(x @ layer.to(x.dtype) + self.bias)
        return (x @ self.stack).float().square().mean() * self.scale.float() + self.empty.sum()


WHOLE = {
    "muon": {"optimizer": "muon"},
    "muon on the host": {
        "optimizer": "muon",
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "offload_mode": "overlap",
    },
    "adam": {"optimizer": "adam"},
    "lamb": {"optimizer": "lamb"},
}
KEPT_WHOLE = [(1, rule) for rule in WHOLE]
SHARED = {
    "plain": {"data_parallel_sharding_strategy": "no_shard"},
    "whole": {"use_layer_wise_distributed_optimizer": True},
    "whole, ZeRO-2": {
        "use_layer_wise_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "data_parallel_sharding_strategy": "optim_grads",
    },
    "whole, overlap": {
        "use_layer_wise_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}


def whole(seed: int, rule: str, how: str, folder: str = "") -> dict[str, Any]:
    """Train with parameters whole on one rank, or on all; perhaps from a checkpoint on."""
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    model = Uneven(seed).to(dtype)
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config = OptimizerConfig(
        lr=1e-2,
        use_distributed_optimizer=True,
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        **WHOLE[rule],
        **SHARED[how],
    )
    optimizer: Any = get_megatron_optimizer(config, model)
    start = 2 if folder else 0
    if folder:
        checkpoint.load(folder, model, optimizer)
    norms = []
    for step in range(start, start + 2 if not folder else 4):
        optimizer.zero_grad()
        tokens = torch.randint(
            0, 20, (6,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
        )
        model(tokens).backward()
        norms.append(optimizer.step().grad_norm)
    optimizer.finish_param_sync()
    if not folder:
        checkpoint.save(f"{FOLDER}/{seed}-{rule}-{how}", model, optimizer)
    return {
        "bits": digest(model),
        "norms": norms,
        "buffer": model.table.untyped_storage().nbytes() / (size * dtype.itemsize),
    }


def largest_exchange(numels: list[int]) -> float:
    """Most elements that one collective moves here, for each element of the bucket."""
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


# -- ranks that disagree ---------------------------------------------------------------------------


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def built(strategy: str) -> tuple[nn.Module, MegatronOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    config = OptimizerConfig(
        lr=1e-2, use_distributed_optimizer=True, data_parallel_sharding_strategy=strategy
    )
    return model, get_megatron_optimizer(config, model)


def step_otherwise(what: str, strategy: str) -> dict[str, Any]:
    """Two steps; before the second, the second rank does something that the others do not."""
    odd = dist.get_rank() == 1
    model, optimizer = built(strategy)
    for step in range(2):
        if what != "zero_grad" or step == 0 or not odd:
            optimizer.zero_grad()
        if what == "count" and step == 1 and odd:
            optimizer.counts.steps += 1  # a step that the others have not taken
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
    "log_update_ratios_interval": 1,
    "skip_step_sigma_factor": 3.0,
}
"""Each alone on one rank."""


def fsdp_disagrees(what: str) -> dict[str, Any]:
    """The same with FSDP2, where the last rank has other settings; stepped at once, or in parts as
    Megatron's callers may."""
    what, _, how = what.partition(", ")
    odd = dist.get_rank() == RANKS - 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    settings: dict[str, Any] = {"lr": 1e-2, "clip_grad": 1.0}
    if what in OTHER_SETTINGS and odd:
        settings[what] = OTHER_SETTINGS[what]
    if what == "path":  # each rank's own
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


def called_twice() -> dict[str, Any]:
    """The second rank steps twice where the others step once and go on with another pass."""
    group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=3))
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, use_distributed_optimizer=True),
        model,
        process_groups=ProcessGroups(dp=group),
    )

    def go() -> None:
        for step in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 8)).square().mean().backward()
            optimizer.step()
            if dist.get_rank() == 1 and step == 0:
                optimizer.step()

    return {"told": error_of(go)}


def main(directory: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    groups = {
        "dp": dist.group.WORLD,
        "expert_dp": dist.new_group(list(range(RANKS))),
        "alone": dist.new_subgroups(1)[0],
    }
    global FOLDER
    FOLDER = directory
    found: dict[str, Any] = {}
    for seed in range(PROGRAMS):
        found[f"program {seed}"] = [program(seed, groups, plain) for plain in (True, False)]
    found["otherwise"] = {
        (what, strategy): step_otherwise(what, strategy) for what, strategy in OTHERWISE
    }
    found["fsdp"] = {
        what: fsdp_disagrees(what)
        for what in ("nothing", "path", "lr", "lr, in parts", "gradient", *OTHER_SETTINGS)
    }
    found["twice"] = called_twice()
    for seed, rule in KEPT_WHOLE:
        runs = {how: whole(seed, rule, how) for how in SHARED}
        for how, other in (("plain", "whole"), ("whole", "plain")):
            runs[f"{how}, resumed"] = whole(seed, rule, how, f"{directory}/{seed}-{rule}-{other}")
        found[f"whole {seed} {rule}"] = runs
    found["exchange"] = [
        largest_exchange(sizes) for sizes in ([100_000, 300, 5], [5000] * 7, [9000])
    ]
    torch.save(found, f"{directory}/rank{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own exit


if __name__ == "__main__":
    main(sys.argv[1])
