"""Four gloo processes: Muon over split parameters, compared with whole ones."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from mp_optim import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    ProcessGroups,
    get_megatron_optimizer,
)
from mp_optim.core.flat_shard import FlatShard
from mp_optim.muon import matrix_exchange
from support.as_rank import as_rank

Shapes = dict[str, tuple[int, ...]]
SHAPES = {
    "wide": (6, 10),
    "tall": (10, 6),
    "narrow": (2, 9),
    "fused": (32, 6),
    "embed": (7, 6),
    "bias": (9,),
    "experts.up": (4, 6, 10),
    "experts.down": (3, 8, 6),
}
OVERRIDES = {
    ParamKey(name="fused*"): {"qkv_split_shapes": (4, 2, 2)},
    ParamKey(name="embed"): {"optimizer": "adam"},
}
MANY = {
    **{f"square{index}": (32, 32) for index in range(8)},
    **{f"wide{index}": (16, 48) for index in range(8)},
    **{f"fused{index}": (32, 16) for index in range(4)},
    "tall": (96, 16),
    "embed": (8, 8),
    "experts.up": (12, 16, 24),
}
"""Matrices that ranks can share evenly."""
LATE = ("wide1", "wide2")
"""Matrices without a gradient at the second step."""
STEPS = 3


def values(step: int, shapes: Shapes = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def model_of(params: dict[str, Tensor]) -> nn.Module:
    model = nn.Module()
    model.experts = nn.Module()
    for name, value in params.items():
        owner = model.experts if name.startswith("experts.") else model
        owner.register_parameter(name.removeprefix("experts."), nn.Parameter(value))
    return model


def built(
    model: nn.Module, groups: ProcessGroups | None = None, **settings: object
) -> MegatronOptimizer:
    config = OptimizerConfig(optimizer="muon", lr=1e-2, weight_decay=0.1, bf16=True, **settings)
    return get_megatron_optimizer(config, model, OVERRIDES, process_groups=groups)


def by_rows(mesh: DeviceMesh | None = None, **settings: object) -> dict[str, Tensor]:
    """Step parameters that are split by rows or whole; return whole main params."""

    def part(value: Tensor) -> Tensor:
        return value.clone() if mesh is None else distribute_tensor(value, mesh, [Shard(0)])

    model = model_of({name: part(value) for name, value in values(-1).items()})
    named = dict(model.named_parameters())
    optimizer = built(model, **settings)
    for step in range(STEPS):
        for name, grad in values(step).items():
            named[name].grad = part(grad)
        assert optimizer.step().success
    mains = {name: main.detach() for name, main in optimizer.named_main_params()}
    return {
        name: (main.full_tensor() if isinstance(main, DTensor) else main).clone()
        for name, main in mains.items()
    }


def shared(
    part: Callable[[str, Tensor], Tensor],
    whole: Callable[[str, Tensor], Tensor],
    mark: Callable[[str, Tensor], None] = lambda name, param: None,
    groups: ProcessGroups | None = None,
    late: Sequence[str] = (),
    **settings: object,
) -> dict[str, object]:
    model = model_of({n: part(n, value) for n, value in values(-1, MANY).items()})
    named = dict(model.named_parameters())
    for name, param in named.items():
        mark(name, param)
    optimizer = built(model, groups, **settings)
    for name, grad in values(0, MANY).items():
        (named[name] * part(name, grad)).sum().backward()
    assert optimizer.step().success
    optimizer.zero_grad()
    for name, grad in values(1, MANY).items():
        if name not in late:
            (named[name] * part(name, grad)).sum().backward()
    with FlopCounterMode(display=False) as counter:
        assert optimizer.step().success
    mains = {name: whole(name, main).clone() for name, main in optimizer.named_main_params()}
    told = optimizer.metrics()["muon_flops"]
    return {"mains": mains, "flops": counter.get_total_flops(), "told": told}


def alone(late: Sequence[str] = (), **settings: object) -> dict[str, object]:
    return shared(
        lambda name, value: value.clone(), lambda name, main: main.detach(), late=late, **settings
    )


def _both(name: str) -> Sequence[object]:
    return [Shard(0), Shard(0)] if "fused" in name else [Shard(-2), Shard(-1)]


OWNERS: dict[str, tuple[tuple[int, ...], Callable[[str], Sequence[object]]]] = {
    "4 ranks, rows": ((4,), lambda name: [Shard(-2)]),
    "4 ranks, columns": ((4,), lambda name: [Shard(-1)]),
    "2 x 2, both": ((2, 2), _both),
}


def on_ranks(mesh: DeviceMesh, layout: Callable[[str], Sequence[object]]) -> dict[str, object]:
    return shared(
        lambda name, value: distribute_tensor(
            value, mesh, [Shard(each.dim % value.dim()) for each in layout(name)]
        ),
        lambda name, main: main.full_tensor(),
        late=LATE,
    )


def by_tensor_parallelism() -> dict[str, object]:
    world, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()

    def dim(name: str) -> int:
        return -1 if name.startswith("wide") else -2

    def mark(name: str, param: Tensor) -> None:
        param.tensor_model_parallel = True
        param.partition_dim = dim(name) % param.dim()

    def whole(name: str, main: Tensor) -> Tensor:
        parts = [torch.empty_like(main) for _ in range(size)]
        dist.all_gather(parts, main.detach().contiguous())
        return torch.cat(parts, dim(name))

    return shared(
        lambda name, value: value.chunk(size, dim(name))[rank].contiguous(),
        whole,
        mark,
        ProcessGroups(grad_stats=world, tp=world, expert_grad_stats=world, expert_tp=world),
        LATE,
    )


def by_zero(ranks: dist.ProcessGroup, **settings: object) -> dict[str, object]:
    def whole(name: str, main: Tensor) -> Tensor:
        flat = torch.zeros(math.prod(MANY[name]))
        local = main.local if isinstance(main, FlatShard) else main.detach().flatten()
        first = main.start if isinstance(main, FlatShard) else 0
        flat[first : first + local.numel()] = local
        dist.all_reduce(flat, group=ranks)
        return flat.view(MANY[name])

    return shared(
        lambda name, value: value.clone(),
        whole,
        groups=ProcessGroups(dp=ranks, expert_dp=ranks),
        use_distributed_optimizer=True,
        **settings,
    )


ZERO: dict[str, dict[str, object]] = {
    "4 ranks, optim": {"bucket_size": 3000},
    "2 ranks, optim_grads": {"data_parallel_sharding_strategy": "optim_grads"},
    "4 ranks, layer-wise": {"use_layer_wise_distributed_optimizer": True},
}


def shares() -> dict[str, dict[str, object]]:
    matrix_exchange.LEAST_BATCH_BYTES = 1
    found: dict[str, dict[str, object]] = {}
    for case, (shape, layout) in OWNERS.items():
        mesh = DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape))
        if mesh.get_coordinate() is not None:
            found[case] = on_ranks(mesh, layout)
    found["4 ranks, tensor parallel"] = by_tensor_parallelism()
    pair = dist.new_group([0, 1])
    for case, settings in ZERO.items():
        if case.startswith("4 ranks"):
            found[case] = by_zero(dist.group.WORLD, **settings)
        elif dist.get_rank() < 2:
            found[case] = by_zero(pair, **settings)
    return found


def unknown_partition() -> str:
    """Return the error for a split parameter without a partition dimension, or "nothing"."""
    model = model_of(values(-1))
    model.get_parameter("wide").tensor_model_parallel = True
    try:
        built(model, ProcessGroups(tp=dist.group.WORLD))
    except ValueError as error:
        return str(error)
    return "nothing"


def main(folder: Path) -> Any:
    found: dict[str, object] = {"unknown partition": unknown_partition()}
    mesh = DeviceMesh("cpu", torch.arange(2))
    if mesh.get_coordinate() is not None:
        found["blockwise"] = by_rows(mesh, muon_tp_mode="blockwise")
    found["shares"] = shares()
    return found


if __name__ == "__main__":
    as_rank(main)
