"""Four gloo processes: Adafactor and StableAdamW over parameters that are split in every way; each
layout begins with the checkpoint of one process, and leaves one."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mp_optim import MegatronOptimizer, OptimizerConfig, checkpoint, get_megatron_optimizer
from support.by_day import is_asked_for

SHAPES = {
    "wide": (6, 10),
    "tall": (37, 3),
    "one row": (1, 9),
    "one column": (9, 1),
    "bias": (9,),
    "scalar": (),
    "stack": (4, 5, 6),
    "kernel": (4, 3, 2, 5),
    "large": (300, 700),
}
BEFORE, AFTER = range(3), range(3, 5)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "remainders": {"bf16": True, "use_precision_aware_optimizer": True},
}
KINDS = [
    ("adafactor", "fp32", 0.0),
    ("adafactor", "fp32", 0.5),
    ("adafactor", "bf16", 1.0),
    ("adafactor", "remainders", 0.5),
    ("stable_adamw", "remainders", 0.5),
]
"""Rule, precision, and the share that is stepped on the host."""
SETTINGS: dict[str, dict[str, Any]] = {
    "adafactor": {"lr": 0.05},
    "stable_adamw": {"lr": 0.05, "adam_beta2": 0.99},
}
ZERO: dict[str, dict[str, Any]] = {
    "optim": {"use_distributed_optimizer": True},
    "optim_grads": {
        "use_distributed_optimizer": True,
        "data_parallel_sharding_strategy": "optim_grads",
        "bucket_size": 1000,
    },
    "no_shard": {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "no_shard"},
    "layer-wise": {"use_layer_wise_distributed_optimizer": True},
}
Placements = Callable[[tuple[int, ...]], Sequence[Any]]


def values(step: int, precision: str) -> dict[str, Tensor]:
    """Parameters at step -1, gradients at the others: of magnitudes that differ."""
    generator = torch.Generator().manual_seed(100 + step)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    found = {}
    for name, shape in SHAPES.items():
        spread = torch.exp2(-12 * torch.rand(shape, generator=generator))
        found[name] = (torch.randn(shape, generator=generator) * spread).to(dtype)
    return found


def built(
    model: nn.Module, rule: str, precision: str, fraction: float, **settings: Any
) -> MegatronOptimizer:
    if fraction:
        settings |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    config = OptimizerConfig(
        optimizer=rule,
        weight_decay=0.1,
        clip_grad=0.0,
        **SETTINGS[rule],
        **PRECISIONS[precision],
        **settings,
    )
    return get_megatron_optimizer(config, model)


def model_of(precision: str, part: Callable[[Tensor], Tensor]) -> nn.ParameterDict:
    start = values(-1, precision)
    return nn.ParameterDict({name: nn.Parameter(part(value)) for name, value in start.items()})


def train(
    model: nn.ParameterDict,
    optimizer: MegatronOptimizer,
    precision: str,
    steps: range,
    part: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Steps with the same gradients on every rank; by backward where no ``part`` is given."""
    for step in steps:
        grads = values(step, precision)
        optimizer.zero_grad()
        if part is not None:
            for name, param in model.items():
                param.grad = part(grads[name])
        else:
            terms = [(param * grads[name]).float().sum() for name, param in model.items()]
            torch.stack(terms).sum().backward()
        assert optimizer.step().success
    for each in optimizer.chained_optimizers:
        if hasattr(each, "finish_param_sync"):
            each.finish_param_sync()


def outcome(model: nn.ParameterDict) -> dict[str, Tensor]:
    found = {}
    for name, param in model.items():
        value = param.detach()
        found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found


def single(
    rule: str, precision: str, folder: str = "", fraction: float = 0.0, load: str = ""
) -> dict[str, Tensor]:
    """The same in one process."""
    model = model_of(precision, Tensor.clone)
    optimizer = built(model, rule, precision, fraction)
    if load:
        checkpoint.load(load, model, optimizer)
        train(model, optimizer, precision, AFTER, Tensor.clone)
        return outcome(model)
    train(model, optimizer, precision, BEFORE, Tensor.clone)
    if folder:
        checkpoint.save(f"{folder}/{rule}-{precision}", model, optimizer)
    train(model, optimizer, precision, AFTER, Tensor.clone)
    if rule == "stable_adamw":
        assert 0 < optimizer.metrics()["update_clipped_params"] < len(SHAPES)
    return outcome(model)


def _rows(shape: tuple[int, ...]) -> Sequence[Any]:
    return [Shard(0) if shape else Replicate()]


def _columns(shape: tuple[int, ...]) -> Sequence[Any]:
    return [Shard(len(shape) - 1) if shape else Replicate()]


def _middle(shape: tuple[int, ...]) -> Sequence[Any]:
    return [Shard(1) if len(shape) > 1 else Replicate()]


def _grid(shape: tuple[int, ...]) -> Sequence[Any]:
    return [Shard(0), Shard(1)] if len(shape) > 1 else [Replicate(), Replicate()]


def _copies(shape: tuple[int, ...]) -> Sequence[Any]:
    return [Replicate(), *_rows(shape)]


MESHES: dict[str, tuple[tuple[int, ...], Placements]] = {
    "rows": ((4,), _rows),
    "columns": ((4,), _columns),
    "middle": ((4,), _middle),
    "both": ((2, 2), _grid),
    "copies": ((2, 2), _copies),
}
LAYOUTS = [*MESHES, *ZERO]


def is_by_day(layout: str, kind: tuple[str, str, float]) -> bool:
    """Every other kind of a layout, and every other layout of a kind."""
    return (LAYOUTS.index(layout) + KINDS.index(kind)) % 2 == 0


def run(
    layout: str, rule: str, precision: str, fraction: float, folder: str
) -> dict[str, dict[str, Tensor]]:
    """Parameters after five steps from the start; and after two from the checkpoint."""
    part: Callable[[Tensor], Tensor] | None = None
    if layout in MESHES:
        shape, placements = MESHES[layout]
        mesh = DeviceMesh("cpu", torch.arange(4).view(shape))

        def part(value: Tensor) -> Tensor:
            return distribute_tensor(value.clone(), mesh, placements(tuple(value.shape)))

    settings = ZERO.get(layout, {})
    model = model_of(precision, part or Tensor.clone)
    optimizer = built(model, rule, precision, fraction, **settings)
    train(model, optimizer, precision, BEFORE, part)
    checkpoint.save(f"{folder}/{layout}-{rule}-{precision}-{fraction:g}", model, optimizer)
    train(model, optimizer, precision, AFTER, part)
    found = {"trained": outcome(model)}
    model = model_of(precision, part or Tensor.clone)
    optimizer = built(model, rule, precision, fraction, **settings)
    checkpoint.load(f"{folder}/{rule}-{precision}", model, optimizer)
    train(model, optimizer, precision, AFTER, part)
    return {**found, "loaded": outcome(model)}


def main(folder: str, *times: str) -> None:
    dist.init_process_group("gloo")
    found = {}
    for layout in LAYOUTS:
        for kind in KINDS:
            if is_asked_for(is_by_day(layout, kind), times):
                found[", ".join(map(str, (layout, *kind)))] = run(layout, *kind, folder)
    torch.save(found, f"{folder}/rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own exit


if __name__ == "__main__":
    main(*sys.argv[1:])
