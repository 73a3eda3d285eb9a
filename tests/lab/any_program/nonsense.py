"""State dicts that cannot be loaded: each has to be refused before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from lab.any_program.oracle import Oracle, Slot
from lab.any_program.subject import Subject, need, refused

Change = Callable[[dict[str, Any], int], None]


def _setting(key: str, value: Any) -> Change:
    def change(state_dict: dict[str, Any], index: int) -> None:
        group = next(group for group in state_dict["param_groups"] if index in group["params"])
        need(key in group)
        group[key] = value

    return change


def _state(key: str, convert: Callable[[torch.Tensor], Any]) -> Change:
    def change(state_dict: dict[str, Any], index: int) -> None:
        state = state_dict["state"][index]
        found = next(
            (name for name in state if name.startswith(key) and not name.endswith("_scale")), None
        )
        need(found is not None and f"{found}_scale" not in state)  # of codes, the values decide
        state[found] = convert(state[found])

    return change


def _scaler(key: str, value: Any) -> Change:
    def change(state_dict: dict[str, Any], index: int) -> None:
        need(state_dict.get("grad_scaler"))
        state_dict["grad_scaler"][key] = torch.as_tensor([value])

    return change


def _without_scaler(state_dict: dict[str, Any], index: int) -> None:
    need(state_dict.get("grad_scaler"))
    del state_dict["grad_scaler"]


def _foreign_index(state_dict: dict[str, Any], index: int) -> None:
    group = next(group for group in state_dict["param_groups"] if index in group["params"])
    group["params"] = [i + 77 for i in group["params"]]


def _finer(tensor: torch.Tensor) -> torch.Tensor:
    need(tensor.numel())
    return tensor.double() + 1 / 3


CHANGES: dict[str, Change] = {
    "a slot is missing": lambda state_dict, index: state_dict["state"].pop(index),
    "no state": lambda state_dict, index: state_dict["state"].clear(),
    "a foreign index": _foreign_index,
    "a group is missing": lambda state_dict, index: state_dict["param_groups"].pop(),
    "lr nan": _setting("lr", float("nan")),
    "lr negative": _setting("lr", -1.0),
    "lr text": _setting("lr", "x"),
    "betas": _setting("betas", (2.0, 3.0)),
    "eps": _setting("eps", -1.0),
    "weight_decay": _setting("weight_decay", float("nan")),
    "step nan": _state("step", lambda tensor: torch.tensor(float("nan"))),
    "step negative": _state("step", lambda tensor: torch.tensor(-3.0)),
    "shape": _state("exp_avg", lambda tensor: torch.zeros(3, 3, 3)),
    "moment missing": lambda state_dict, index: (
        state_dict["state"][index].pop("exp_avg", None) is None and need(False)
    ),
    "moment in 64 bits": _state("exp_avg", _finer),
    "complex moment": _state("exp_avg", lambda tensor: tensor.to(torch.complex64)),
    "master in 64 bits": _state("master_param", _finer),
    "master missing": lambda state_dict, index: (
        state_dict["state"][index].pop("master_param", None) is None and need(False)
    ),
    "scale 0": _scaler("scale", 0.0),
    "scale negative": _scaler("scale", -1.0),
    "scale nan": _scaler("scale", float("nan")),
    "no scaler": _without_scaler,
}

KINDS = tuple(CHANGES)


def load(subject: Subject, oracle: Oracle, kind: str, slot: Slot) -> None:
    """Spoil a copy of the state, load it, and look at what is left."""
    need(slot.bound and oracle.rule != "foreign")  # such a one takes what it finds
    state_dict = copy.deepcopy(subject.optimizer.state_dict())
    index = next(
        index
        for group in state_dict["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
        if name == slot.name
    )
    CHANGES[kind](state_dict, index)
    with refused():
        subject.optimizer.load_state_dict(state_dict)
    subject.check_state_dict(oracle, subject.optimizer.state_dict())
    subject.check_model(oracle)


# -- groups that cannot be added ------------------------------------------------------------------


def _doubles() -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(3, dtype=torch.float64))


GROUPS: dict[str, Callable[[Subject, Slot], dict[str, Any]]] = {
    "lr": lambda subject, slot: {
        "params": [("dense.new", torch.nn.Parameter(torch.ones(3)))],
        "lr": -1.0,
    },
    "there already": lambda subject, slot: {
        "params": [(slot.name, subject.model.param(slot.name))]
    },
    "float64": lambda subject, slot: {"params": [("dense.new", _doubles())]},
    "second is float64": lambda subject, slot: {
        "params": [("dense.newer", torch.nn.Parameter(torch.ones(3))), ("dense.new", _doubles())]
    },
}


def add_group(subject: Subject, oracle: Oracle, kind: str, slot: Slot) -> None:
    need(oracle.rule != "foreign" or kind != "lr")  # its rules are its own
    with refused():
        subject.optimizer.add_param_group(GROUPS[kind](subject, slot))
    assert len(subject.optimizer.param_groups) == len(oracle.groups)
