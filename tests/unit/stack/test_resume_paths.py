"""Resuming gives the bits of the uninterrupted run, in every place and form of state.

The ways to resume: the package's checkpoints, torch's functions, and DCP.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mp_optim

PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "speculative": {"offload": 1.0, "offload_mode": "speculative"},
    "disk": {"offload": 1.0},
}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "8bit and remainder8": {"state": "8bit", "main_params": "remainder8"},
}
Run = tuple[nn.Module, torch.optim.Optimizer]


def train(run: Run, begin: int, end: int) -> list[Tensor]:
    """Step with gradients that depend on the step alone, and on the weights."""
    model, optimizer = run
    for step in range(begin, end):
        x = torch.randn(24, 24, generator=torch.Generator().manual_seed(step))
        (model(x.bfloat16()).float() - x[:, :5].sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [shard.detach().clone() for shard in shards]


# -- ways to resume: each saves a run, and returns a function that loads it into another run ------

Load = Callable[[Run], None]


def own_checkpoint(run: Run, folder: Path) -> Load:
    mp_optim.checkpoint.save(folder, *run)
    return lambda to: void(mp_optim.checkpoint.load(folder, *to))


def dcp_in_place(run: Run, folder: Path) -> Load:
    """torchtitan, verl, and torch's tutorial: the live tensors are loaded into."""

    def save_or_load(of: Run, work: Callable[..., object]) -> dict[str, Any]:
        weights, state = get_state_dict(*of)
        saved = {"model": weights, "optimizer": state}
        work(saved, checkpoint_id=folder)
        return saved

    save_or_load(run, dcp.save)

    def load(to: Run) -> None:
        saved = save_or_load(to, dcp.load)
        model, optimizer = saved["model"], saved["optimizer"]
        set_state_dict(*to, model_state_dict=model, optim_state_dict=optimizer)

    return load


def dcp_flat(run: Run, folder: Path) -> Load:
    """torchtitan's containers: the optimizer's state dict is flattened."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_of(of: Run) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(of[0]),
            "optimizer": get_optimizer_state_dict(*of, options=options),
        }

    dcp.save(state_of(run), checkpoint_id=folder)

    def load(to: Run) -> None:
        saved = state_of(to)
        dcp.load(saved, checkpoint_id=folder)
        set_optimizer_state_dict(*to, saved["optimizer"], options=options)
        set_model_state_dict(to[0], saved["model"])

    return load


def full_state_dicts(run: Run, folder: Path) -> Load:
    options = StateDictOptions(full_state_dict=True)
    weights, state = copy.deepcopy(get_state_dict(*run, options=options))
    return lambda to: void(
        set_state_dict(*to, model_state_dict=weights, optim_state_dict=state, options=options)
    )


def void(*_: object) -> None:
    """Nothing, of calls that return something."""


WAYS = [own_checkpoint, dcp_in_place, dcp_flat, full_state_dicts]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_resume_under_fsdp2_gives_the_same_bits_in_every_place(
    way: Callable[[Run, Path], Load], form: str, tmp_path: Path, one_rank: None
) -> None:
    """Save in one place and resume in every place."""

    def build(place: str) -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 5)).bfloat16()
        fully_shard(model)
        settings = {**PLACES[place], **FORMS[form]}
        if place == "disk":
            settings["optimizer_state_path"] = tmp_path
        return model, mp_optim.AdamW(model.named_parameters(), lr=5e-3, **settings)

    for index, place in enumerate(PLACES):
        run = build(place)
        train(run, 0, 4)
        load = way(run, tmp_path / f"saved{index}")
        expected = train(run, 4, 6)
        after = build(place)
        train(after, 20, 21)  # it has weights and state of its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(after)
        for param, wanted in zip(train(after, 4, 6), expected, strict=True):
            assert torch.equal(param, wanted), place
