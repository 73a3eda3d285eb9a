"""Distributions of one small model over ranks, all saved and loaded by the same functions. A new
layout is added to :func:`layouts`.

Gradients are computed from names and steps, so every layout steps with equal gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mp_optim import OptimizerConfig, ProcessGroups, get_megatron_optimizer
from mp_optim.checkpoint import FlatShard
from support.models import form_fields

SHAPES = {
    "embed": (11, 8),
    "blocks": (4, 256),
    "bias": (7,),
    "cube": (2, 3, 5),
    "wide": (3, 600),
    "scale": (1,),
}


class Model(nn.Module):
    """Parameters of awkward shapes: one in FP32, one frozen, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator)
            setattr(self, name, nn.Parameter(value if name == "scale" else value.bfloat16()))
        self.frozen = nn.Parameter(
            torch.randn(3, generator=generator).bfloat16(), requires_grad=False
        )
        self.reduced_over: dist.ProcessGroup | None = (
            # Gradients of a distributed optimizer come from a backward pass, because they have to
            # be reduced.
            None
        )
        self.register_buffer("count", torch.randint(0, 99, (), generator=generator))


@dataclass(frozen=True)
class Layout:
    """A distribution of the model over ranks.

    Attributes:
        place: converts the model's parameters to this rank's parts.
        form: storage format of the optimizer state.
        fraction: offload fraction.
        permuted: True for param groups in reverse order.
        settings: further fields of the config.
        build_optimizer: builds an optimizer from config, model and param groups.
    """

    name: str
    ranks: int = 1
    place: Callable[[Model], None] = lambda model: None
    form: str = ""
    fraction: float | None = None
    permuted: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    build_optimizer: Callable[..., Any] = lambda config, model, groups: get_megatron_optimizer(
        config, model, param_groups=groups
    )

    def build(self, seed: int) -> tuple[Model, Any]:
        model = Model(seed)
        self.place(model)
        host = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": self.fraction}
        host = {} if self.fraction is None else host
        config = OptimizerConfig(
            bf16=True,
            lr=1e-2 * seed,
            weight_decay=0.1,
            clip_grad=0.0,
            **form_fields(self.form),
            **self.settings,
            **host,
        )
        return model, self.build_optimizer(config, model, self._groups(model))

    def _groups(self, model: Model) -> list[dict[str, Any]]:
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        order = -1 if self.permuted else 1
        groups = []
        for decay in (0.1, 0.0):
            pairs = [pair for pair in named if (pair[1].dim() > 1) == bool(decay)][::order]
            names, params = ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
            groups.append({"params": params, "param_names": names, "weight_decay": decay})
        return groups[::order]


def sharded(dim: int, mesh: DeviceMesh) -> Callable[[Model], None]:
    def place(model: Model) -> None:
        for name, param in list(model.named_parameters()):
            if param.dim() > dim:
                value = distribute_tensor(param.detach(), mesh, [Shard(dim)], src_data_rank=None)
                setattr(model, name, nn.Parameter(value, requires_grad=param.requires_grad))

    return place


def fsdp(mesh: DeviceMesh) -> Callable[[Model], None]:
    return lambda model: (
        fully_shard(model, mesh=mesh, ignored_params={model.scale, model.frozen}),
        None,
    )[1]


def zero(name: str, size: int, group: Any, strategy: str = "optim", **options: Any) -> Layout:
    settings = {
        "use_distributed_optimizer": True,
        "data_parallel_sharding_strategy": strategy,
        "grad_reduce_op": "sum",
        "bucket_size": 700,
    }
    return Layout(
        name,
        ranks=size,
        settings=settings,
        place=lambda model: setattr(model, "reduced_over", group),
        **options,
        build_optimizer=lambda config, model, groups: get_megatron_optimizer(
            config, model, param_groups=groups, process_groups=ProcessGroups(dp=group)
        ),
    )


def layouts(size: int = 4) -> list[Layout]:
    two = DeviceMesh("cpu", [0, 1])
    return _up_to_two(two) + (_up_to_four() if size == 4 else [])


def _up_to_four() -> list[Layout]:
    three = DeviceMesh("cpu", [0, 1, 2])
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    return [
        Layout("fsdp-3, offload-half", ranks=3, place=fsdp(three), fraction=0.5),
        Layout("hsdp-2x2", ranks=4, place=fsdp(square), permuted=True),
        Layout("8 bits on fsdp-3", ranks=3, place=fsdp(three), form="8bit"),
        zero("zero1-2", 2, groups[2]),
        zero("zero2-3, offload-half", 3, groups[3], strategy="optim_grads", fraction=0.5),
        zero("zero1-4, groups permuted", 4, groups[4], permuted=True),
        zero("not sharded on 2", 2, groups[2], strategy="no_shard"),
        zero("bf16 moments, remainders on zero1-3", 3, groups[3], form="bf16"),
        zero("8 bits on zero1-2", 2, groups[2], form="8bit", fraction=1.0),
    ]


def _up_to_two(two: DeviceMesh) -> list[Layout]:
    return [
        Layout("plain"),
        Layout("offload-half", fraction=0.5),
        Layout("offload-all, copies on 2", ranks=2, fraction=1.0),
        Layout("groups permuted", permuted=True),
        Layout("fsdp-2", ranks=2, place=fsdp(two)),
        Layout("shard1-2", ranks=2, place=sharded(1, two)),
        Layout("bf16 moments, remainders", form="bf16", fraction=0.5),
        Layout("bf16 moments on fsdp-2", ranks=2, place=fsdp(two), form="bf16"),
        Layout("8 bits", form="8bit"),
    ]


def part_of(full: Tensor, like: Tensor) -> Tensor:
    if full.shape != like.shape:
        return full
    if isinstance(like, DTensor):
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    if isinstance(like, FlatShard):
        return FlatShard(
            full.reshape(-1)[like.start : like.start + like.local.numel()].clone(),
            full.shape,
            like.start,
        )
    return full


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.local if isinstance(tensor, FlatShard) else tensor
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def train(model: Model, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        grads = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
                grads[param] = part_of(
                    torch.randn(param.shape, generator=generator).to(param.dtype), param
                )
        if (
            model.reduced_over is not None
            # Rank 0 backpropagates the whole gradient and the other ranks zeros, so the sum is the
            # gradient.
        ):
            share = float(dist.get_rank(model.reduced_over) == 0)
            torch.stack(
                [(param * grad * share).sum().float() for param, grad in grads.items()]
            ).sum().backward()
        else:
            for param, grad in grads.items():
                param.grad = grad
        optimizer.step()


def state_of(model: Model, optimizer: Any) -> dict[str, Tensor]:
    names = {slot: optimizer.slot_name(slot) for slot in optimizer.slots()}
    return {
        **{f"model.{name}": value for name, value in model.state_dict().items()},
        **{
            f"{names[slot]}.{key}": value
            for slot in names
            for key, value in optimizer.full_slot_state(slot).items()
        },
    }


def whole(tensor: Tensor, group: Any) -> Tensor:
    if isinstance(tensor, FlatShard):
        return tensor.full_tensor(group)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def put(
    layout: Layout, full: dict[str, Tensor], settings: list[dict[str, Any]], seed: int
) -> tuple[Model, Any]:
    model, optimizer = layout.build(seed)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            local(value).copy_(local(part_of(full[f"model.{name}"], value)))
    state = optimizer.state_dict(full_precision=True)
    index = 0
    for group, live in zip(state["param_groups"], optimizer.param_groups, strict=True):
        group.update(
            next(saved for saved in settings if saved["weight_decay"] == live["weight_decay"])
        )
        for name in group["param_names"]:
            mine = state["state"][index]
            mine.update({key: part_of(full[f"{name}.{key}"], value) for key, value in mine.items()})
            index += 1
    optimizer.load_state_dict(state, convert=True)
    return model, optimizer
