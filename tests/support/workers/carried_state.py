"""Two gloo processes pass compact state through torch's state-dict functions in all their forms,
and through ``torch.distributed.checkpoint``."""

import json
import warnings
from copy import deepcopy
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mp_optim
from support.as_rank import as_rank
from support.layouts import local

warnings.filterwarnings("ignore")

FORMS: dict[str, dict[str, Any]] = {
    "16 bits": {"main_params": "remainder16"},
    "16 bits, 8bit": {"state": "8bit", "main_params": "remainder16"},
    "8 bits, 4bit": {"state": "4bit", "main_params": "remainder8"},
}
PLACES: tuple[dict[str, Any], ...] = (
    {},
    {"offload": 1.0, "offload_mode": "speculative"},
    {"offload": 1.0, "optimizer_state_path": gettempdir()},
)
"""Places of the saved state, and of the optimizers that load it."""
CASES = [
    ("16 bits", True),
    ("16 bits, 8bit", True),
    ("8 bits, 4bit", True),
    ("8 bits, 4bit", False),
]
FULL = {"full_state_dict": True}
FLAT = {"flatten_optimizer_state_dict": True}
SPREAD = {**FULL, "broadcast_from_rank0": True}
WAYS: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "sharded": ({}, {}),
    "full": (FULL, FULL),
    "full, from the first rank": (FULL, SPREAD),
    "full, on the host of the first rank": ({**FULL, "cpu_offload": True}, SPREAD),
    "flat": (FLAT, FLAT),
    "not strict": ({"strict": False}, {"strict": False}),
}


def build(form: str, is_sharded: bool, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 5)).bfloat16()
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    settings = {**FORMS[form], **PLACES[(seed + len(form)) % len(PLACES)]}
    optimizer = mp_optim.AdamW(model.named_parameters(), lr=1e-2, **settings)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(100 * seed + step)
        model(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
        optimizer.step()
    return model, optimizer


def bits_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    stack = optimizer.stack
    state = {
        f"{slot}.{key}": local(value).clone()
        for slot in stack.slots()
        for key, value in stack.full_slot_state(slot).items()
    }
    return state | {name: local(value) for name, value in model.state_dict().items()}


def same(source: tuple[nn.Module, Any], target: tuple[nn.Module, Any]) -> bool:
    expected, found = bits_of(*source), bits_of(*target)
    return expected.keys() == found.keys() and all(
        torch.equal(value, found[name]) for name, value in expected.items()
    )


def with_weights_of(source: nn.Module, form: str, is_sharded: bool) -> Any:
    model, optimizer = build(form, is_sharded, seed=2)
    model.load_state_dict(deepcopy(source.state_dict()))
    return model, optimizer


def handed_over(form: str, is_sharded: bool, way: str) -> bool:
    get, put = WAYS[way]
    model, optimizer = build(form, is_sharded, seed=1)
    options = StateDictOptions(**get)
    state = deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    if "broadcast_from_rank0" in put and dist.get_rank() > 0:
        state = {}
    target = with_weights_of(model, form, is_sharded)
    set_optimizer_state_dict(*target, state, options=StateDictOptions(**put))
    return same((model, optimizer), target)


def by_files(form: str, is_sharded: bool, folder: Path, dtype: torch.dtype) -> bool:
    model, optimizer = build(form, is_sharded, seed=1)
    state = deepcopy(get_optimizer_state_dict(model, optimizer))
    for held in state["state"].values():
        if "remainder" in held and held["remainder"].dtype == torch.int32:
            held["remainder"] = held["remainder"].to(dtype)
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    target = with_weights_of(model, form, is_sharded)
    empty = get_optimizer_state_dict(*target)
    dcp.load({"optimizer": empty}, checkpoint_id=folder)
    set_optimizer_state_dict(*target, empty)
    return same((model, optimizer), target)


def by_own_files(form: str, is_sharded: bool, folder: Path) -> bool:
    model, optimizer = build(form, is_sharded, seed=1)
    version = mp_optim.checkpoint.save(folder, model, optimizer)
    kinds = {
        kind
        for name, (kind, *_) in json.loads((version / "index.json").read_text())["entries"].items()
        if name.startswith("optimizer.state.remainder.")
    }
    target = build(form, is_sharded, seed=2)
    mp_optim.checkpoint.load(folder, *target)
    other = with_weights_of(model, form, is_sharded)
    state = optimizer.state_dict()
    for index, param in enumerate(model.parameters()):
        if "remainder" in state["state"][index]:
            state["state"][index]["remainder"] = optimizer.state[param]["remainder"]
    other[1].load_state_dict(state)
    wanted = {"16": {"int16"}, "8 ": {"int8"}}[form[:2]]
    found = same((model, optimizer), target) and same((model, optimizer), other)
    return kinds == wanted and found


def main(folder: Path) -> Any:
    found = {}
    for form, is_sharded in CASES:
        name = f"{form}, {'sharded' if is_sharded else 'whole'}"
        for way in WAYS:
            found[f"{name}: {way}"] = handed_over(form, is_sharded, way)
        for dtype in (torch.int32, torch.int16):
            path = folder / f"{name} {dtype}"
            found[f"{path.name}: files"] = by_files(form, is_sharded, path, dtype)
        found[f"{name}: own"] = by_own_files(form, is_sharded, folder / f"{name} own")
    return found


if __name__ == "__main__":
    as_rank(main)
