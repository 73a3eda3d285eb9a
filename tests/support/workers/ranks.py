"""Two gloo processes with different parameters save, save in the background, export, and fail."""

import threading
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer
from mp_optim.checkpoint import writing
from mp_optim.host.leases import Lease
from support.as_rank import as_rank, error_of
from support.layouts import Layout, fsdp, local, state_of, train

warnings.filterwarnings("ignore")


def stage(rank: int, names: list[str], seed: int = 0) -> tuple[nn.Module, Any]:
    model = nn.ParameterDict(
        {
            name: nn.Parameter(torch.full((3, index + 2), float(index + seed)))
            for index, name in enumerate(names)
        }
    )
    return model, get_megatron_optimizer(OptimizerConfig(lr=1e-2, clip_grad=0.0), model)


def step(model: nn.Module, optimizer: Any) -> None:
    for name, param in model.named_parameters():
        param.grad = torch.full_like(param, len(name))
    optimizer.step()


def different_parameters(folder: Path, rank: int) -> bool:
    names = [["a", "bb"], ["ccc", "dddd", "eeeee"]]
    model, optimizer = stage(rank, names[rank])
    step(model, optimizer)
    checkpoint.save(folder, model, optimizer)
    expected: list[Any] = [None, None]
    dist.all_gather_object(
        expected,
        {
            name: (param.detach(), optimizer.state[param]["exp_avg"])
            for name, param in model.named_parameters()
        },
    )
    everything = {**expected[0], **expected[1]}
    model, optimizer = stage(rank, names[1 - rank], seed=7)
    step(model, optimizer)
    checkpoint.load(folder, model, optimizer)
    return all(
        torch.equal(param, everything[name][0])
        and torch.equal(optimizer.state[param]["exp_avg"], everything[name][1])
        for name, param in model.named_parameters()
    )


def grown(folder: Path, rank: int) -> bool:
    for names in ((["a"], ["b"]), (["a"], ["b", "later"]), (["a", "too"], ["b", "later"])):
        model, optimizer = stage(rank, names[rank], seed=rank)
        step(model, optimizer)
        checkpoint.save(folder, model, optimizer)
        other = stage(rank, names[rank], seed=7)
        checkpoint.load(folder, *other)
        for name, param in model.named_parameters():
            if not torch.equal(param, other[0].get_parameter(name)):
                return False
    return True


def in_the_background(folder: Path, layout: Any) -> bool:
    model, optimizer = layout.build(seed=1)
    train(model, optimizer, range(2))
    stepped, read_into = threading.Event(), Lease.read_into

    def held(lease: Lease, to: torch.Tensor) -> None:
        assert stepped.wait(60)
        read_into(lease, to)

    with patch.multiple(Lease, read_into=held), patch.multiple(writing, LENT_FROM=5):
        handle = checkpoint.save(folder, model, optimizer, asynchronous=True)
        train(model, optimizer, range(2, 6))
        stepped.set()
        handle.wait()
    other = layout.build(seed=2)
    checkpoint.load(folder, *other, verify=True)
    train(*other, range(2, 6))
    found, expected = state_of(*other), state_of(model, optimizer)
    return all(torch.equal(local(found[name]), local(value)) for name, value in expected.items())


def exported(folder: Path, layout: Any) -> bool:
    model, optimizer = layout.build(seed=1)
    train(model, optimizer, range(2))
    plain, reference = Layout("plain").build(seed=1)
    train(plain, reference, range(2))
    files = checkpoint.export_safetensors(folder, optimizer, max_shard_size=3000)
    found = {name: value for path in files for name, value in load_file(path).items()}
    expected = {name: main.detach().float() for name, main in reference.named_main_params()}
    return (
        found.keys() == expected.keys()
        and len(files) > 1
        and all(torch.equal(found[name], value) for name, value in expected.items())
    )


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "asynchronous": ("save", {"asynchronous": True}),
    "full_precision": ("save", {"full_precision": True}),
    "keep": ("save", {"keep": 0}),
    "path": ("save", {}),
    "the call": ("save", {}),
    "convert": ("load", {"convert": True}),
    "verify": ("load", {"verify": True}),
}
"""Calls with an argument that differs on the second rank."""


def failures(folder: Path, rank: int) -> dict[str, str]:
    """Return this rank's error for each save that fails on one rank; no save may hang."""
    model, optimizer = stage(rank, ["w"])
    found = {
        "extra": error_of(lambda: checkpoint.save(folder, model, optimizer, extra={"bad": folder}))
    }
    write = writing.Writing.write

    def full(self: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write(self)

    writing.Writing.write = full
    found["disk"] = error_of(lambda: checkpoint.save(folder, model, optimizer))
    handle = checkpoint.save(folder, model, optimizer, asynchronous=True)
    if rank == 0:
        error_of(handle.wait)  # This rank has raised the error, the other rank has not.
    found["background"] = error_of(lambda: checkpoint.save(folder, model, optimizer))
    writing.Writing.write = write
    found["other shape"] = error_of(
        lambda: checkpoint.save(
            folder, nn.ParameterDict({"w": nn.Parameter(torch.zeros(rank + 1))}), None
        )
    )
    part = nn.Linear(32, 16)
    with torch.no_grad():
        part.weight.fill_(rank)  # Both ranks save a local expert or a part under one name.
        part.bias.fill_(1.0)
    found["other values"] = error_of(lambda: checkpoint.save(folder, part, None))
    found["left"] = str([path.name for path in folder.iterdir() if path.name == "latest"])
    checkpoint.save(folder, model, optimizer)
    for name, (call, given) in CALLS.items():
        save, load = checkpoint.save, checkpoint.load
        made = {"save": save, "load": load}[call]
        path = folder if name != "path" or rank == 0 else folder / "elsewhere"
        arguments = given if rank == 1 else {}
        if name == "the call" and rank == 1:
            made = load
        found[f"other {name}"] = error_of(
            lambda made=made, path=path, arguments=arguments: made(  # type: ignore[misc]
                path, model, optimizer, **arguments
            )
        )
    found["versions"] = str([path.name for path in checkpoint.versions(folder)])
    other = stage(rank, ["w"] if rank == 0 else ["w", "x"])
    found["export"] = error_of(lambda: checkpoint.export_safetensors(folder / "export", other[1]))
    found["another model"] = error_of(lambda: checkpoint.load(folder, *other))
    return found


def main(folder: Path) -> Any:
    rank, root = dist.get_rank(), folder
    sharded = Layout("fsdp-2", 2, fsdp(DeviceMesh("cpu", [0, 1])))
    return {
        "different": different_parameters(root / "different", rank),
        "grown": grown(root / "grown", rank),
        "background_": in_the_background(root / "background", sharded),
        "exported": exported(root / "exported", sharded),
        **failures(root / "failures", rank),
    }


if __name__ == "__main__":
    as_rank(main)
