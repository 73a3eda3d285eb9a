"""Distributions of one small model over ranks.

Gradients are computed from names and steps, so every layout steps with equal gradients.
"""

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
        # Gradients of a distributed optimizer come from a backward pass, which reduces them.
        self.reduced_over: dist.ProcessGroup | None = None
        self.register_buffer("count", torch.randint(0, 99, (), generator=generator))


@dataclass(frozen=True)
class Layout:
    """A distribution of the model over ranks.

    Attributes:
        place: converts the model's parameters to this rank's parts.
        form: storage format of the optimizer state.
        fraction: offload fraction.
        settings: further fields of the config.
        build_optimizer: builds an optimizer from config, model and param groups.
    """

    name: str
    ranks: int = 1
    place: Callable[[Model], None] = lambda model: None
    form: str = ""
    fraction: float | None = None
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
        groups = []
        for decay in (0.1, 0.0):
            pairs = [pair for pair in named if (pair[1].dim() > 1) == bool(decay)]
            groups.append({"params": pairs, "weight_decay": decay})
        return groups


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


def part_of(full: Tensor, like: Tensor) -> Tensor:
    if isinstance(like, DTensor):
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
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
                grad = torch.randn(param.shape, generator=generator).to(param.dtype)
                grads[param] = part_of(grad, param)
        if model.reduced_over is None:
            for param, grad in grads.items():
                param.grad = grad
        else:  # Rank 0 has the whole gradient and the other ranks zeros.
            share = float(dist.get_rank(model.reduced_over) == 0)
            losses = [(param * grad * share).sum().float() for param, grad in grads.items()]
            torch.stack(losses).sum().backward()
        optimizer.step()


def state_of(model: Model, optimizer: Any) -> dict[str, Tensor]:
    names = {slot: optimizer.slot_name(slot) for slot in optimizer.slots()}
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for slot, name in names.items():
        for key, value in optimizer.full_slot_state(slot).items():
            found[f"{name}.{key}"] = value
    return found
