"""Checks on two ranks: FSDP2, resharded checkpoints and mixed meshes."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mp_optim.apps.conform.kit import (
    Make,
    layers,
    make_or_refuse,
    nice,
    noise,
    require_close,
    require_same,
    should,
    train,
)


def whole_weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the full weights, gathered from all ranks."""
    values = [param.detach() for param in model.parameters()]
    return [v.full_tensor() if isinstance(v, DTensor) else v.clone() for v in values]


def sharded_layers() -> nn.Module:
    model = layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def shared_folder() -> Path:
    """Return the path of a new folder, equal on both ranks."""
    made: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(made[0])


@should(ranks=2)
def fsdp2_trains_as_one_process(make: Make) -> None:
    """A model that fully_shard shards over two ranks trains as the model does in one process."""
    plain, sharded = layers(), sharded_layers()
    train(plain, make(plain.parameters()), 4)
    train(sharded, make_or_refuse(make, sharded.parameters()), 4)
    for found, expected in zip(whole_weights(sharded), whole_weights(plain), strict=True):
        require_close(found, expected, 2e-5, "on two ranks, after four steps")


@should(ranks=2)
def a_sharded_checkpoint_resumes(make: Make) -> None:
    """A run that torch.distributed.checkpoint saves on two ranks resumes bit for bit."""
    model = sharded_layers()
    optimizer = make_or_refuse(make, model.parameters())
    train(model, optimizer, 3)
    folder = shared_folder()
    content = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    save(content, checkpoint_id=folder)
    other = sharded_layers()
    fresh = make(other.parameters())
    wanted = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, fresh)}
    load(wanted, checkpoint_id=folder)
    other.load_state_dict(wanted["model"])
    set_optimizer_state_dict(other, fresh, wanted["optim"])
    train(model, optimizer, 2, 3)
    train(other, fresh, 2, 3)
    require_same(whole_weights(other), whole_weights(model), "two steps after resuming")


@should(ranks=2)
def a_checkpoint_is_resharded(make: Make) -> None:
    """A checkpoint that two ranks save as shards resumes without sharding, and the reverse."""
    for first, second in ((sharded_layers(), layers()), (layers(), sharded_layers())):
        optimizer = make_or_refuse(make, first.parameters())
        train(first, optimizer, 3)
        folder = shared_folder()
        content = {"model": first.state_dict(), "optim": get_optimizer_state_dict(first, optimizer)}
        save(content, checkpoint_id=folder)
        fresh = make(second.parameters())
        wanted = {"model": second.state_dict(), "optim": get_optimizer_state_dict(second, fresh)}
        load(wanted, checkpoint_id=folder)
        second.load_state_dict(wanted["model"])
        set_optimizer_state_dict(second, fresh, wanted["optim"])
        train(first, optimizer, 2, 3)
        train(second, fresh, 2, 3)
        for found, expected in zip(whole_weights(second), whole_weights(first), strict=True):
            require_close(found, expected, 2e-5, "two steps after loading in another layout")


@should(ranks=2)
def meshes_may_be_mixed(make: Make) -> None:
    """One optimizer steps DTensors of two meshes together with a plain tensor, as models with
    partial tensor parallelism need."""
    line = init_device_mesh("cpu", (2,))
    plane = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    laid: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda value: distribute_tensor(value, line, [Shard(0)]),
        lambda value: distribute_tensor(value, plane, [Replicate(), Shard(1)]),
        lambda value: value,
    ]
    params = [nn.Parameter(lay(noise(12, 8, seed=n))) for n, lay in enumerate(laid)]
    alone = [nn.Parameter(noise(12, 8, seed=n)) for n in range(3)]
    both = [make_or_refuse(make, params), make(alone)]
    for step in range(3):
        for n, lay in enumerate(laid):
            alone[n].grad = noise(12, 8, seed=10 * step + n)
            params[n].grad = lay(noise(12, 8, seed=10 * step + n))
        for optimizer in both:
            optimizer.step()
    for found, expected in zip(whole_weights(nn.ParameterList(params)), alone, strict=True):
        require_close(found, expected, 1e-5, "against plain tensors")


@should(ranks=2)
def a_rank_may_have_nothing_of_a_parameter(make: Make) -> None:
    """A parameter of one row on two ranks, empty on the second rank, is stepped as if it were
    whole."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(noise(1, 16), mesh, [Shard(0)]))
    alone = nn.Parameter(noise(1, 16))
    both = [make_or_refuse(make, [param]), make([alone])]
    for step in range(3):
        alone.grad = noise(1, 16, seed=step)
        param.grad = distribute_tensor(noise(1, 16, seed=step), mesh, [Shard(0)])
        for optimizer in both:
            optimizer.step()
    (found,) = whole_weights(nn.ParameterList([param]))
    require_close(found, alone, 1e-5, "against a whole tensor")


@nice(ranks=2)
def zero_redundancy_wraps_it(make: Make) -> None:
    """torch's ZeroRedundancyOptimizer shards the optimizer over two ranks, and trains as one
    process does."""
    plain, spread = layers(), layers()
    train(plain, make(plain.parameters()), 3)
    maker: Any = make
    optimizer = ZeroRedundancyOptimizer(spread.parameters(), optimizer_class=maker)
    train(spread, optimizer, 3)
    require_same(copy.deepcopy(whole_weights(spread)), whole_weights(plain), "after three steps")
