"""Ways to save the state of an optimizer, and to load it into another one."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lab.any_program.oracle import Oracle, Scaler, Slot
from lab.any_program.setups import Place
from lab.any_program.subject import (
    Model,
    Subject,
    as_tensor,
    expect_bits,
    need,
    random_values,
    refused,
    saved_state,
)
from mp_optim import checkpoint
from mp_optim.apps.convert import export_state
from mp_optim.core.slot_state import MASTER

LOOKS = (
    "state_dict",
    "full precision",
    "torch.save",
    "pickle",
    "view",
    "main params",
    "export",
    "foreign",
    "dcp",
)
WAYS = (
    "state_dict",
    "deepcopy",
    "torch.save",
    "pickle",
    "full precision",
    "checkpoint",
    "full checkpoint",
    "background",
)


def through_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


COPIES = {
    "torch.save": through_file,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
}


def look(subject: Subject, oracle: Oracle, how: str) -> None:
    optimizer = subject.optimizer
    if how == "view":
        need(oracle.rule != "foreign")
        assert all(
            (param in optimizer.state) == oracle.slots[name].bound
            for name, param in subject.params()
            if name in oracle.slots
        )
        for _, slot in oracle.order():
            if slot.bound:
                shown = optimizer.state[subject.model.param(slot.name)]
                assert float(shown["step"]) == slot.step
                _check_main(slot, shown)
    elif how == "main params":
        subject.check_main_params(oracle)
    elif how == "export":
        _check_export(subject, oracle)
    elif how in ("foreign", "dcp"):
        need(oracle.rule != "foreign")
        if how == "foreign":
            states = export_state(optimizer).state
        else:
            states = get_optimizer_state_dict(subject.model, optimizer)["state"]
        for name, state in states.items():
            _check_main(oracle.slots[name], state)
    else:
        full = how == "full precision"
        state_dict = optimizer.state_dict(full_precision=full)
        subject.check_state_dict(oracle, COPIES.get(how, lambda value: value)(state_dict), full)
        _write_over_settings(state_dict)
        subject.check_state_dict(oracle, optimizer.state_dict(full_precision=full), full)


def _check_main(slot: Slot, state: dict[str, Any]) -> None:
    if MASTER in state:
        expect_bits(f"main param of {slot.name}", state[MASTER], slot.value())


def _write_over_settings(state_dict: dict[str, Any]) -> None:
    for group in state_dict["param_groups"]:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(123.0)
        group["weight_decay"] = 123.0
    for value in state_dict.get("grad_scaler", {}).values():
        value.fill_(3)


def _check_export(subject: Subject, oracle: Oracle) -> None:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        (path,) = checkpoint.export_safetensors(folder, subject.optimizer)
        found = load_file(path)
    assert set(found) == {slot.name for _, slot in oracle.order()}
    for name, tensor in found.items():
        expect_bits(f"exported {name}", tensor, oracle.slots[name].value())


# -- into another optimizer -----------------------------------------------------------------------


def fresh(
    before: Subject,
    oracle: Oracle,
    place: Place,
    seed: int,
    transposed: dict[str, bool],
    frozen: bool,
) -> Subject:
    """Return a model with other values, and its optimizer with the same groups.

    Args:
        frozen: True if frozen parameters are frozen before the optimizer is built.
    """
    model = Model()
    for name, param in before.params():
        dtype = {torch.float32: "fp32"}.get(param.dtype, before.setup.precision)
        values = random_values(200 + seed, tuple(param.shape), dtype).reshape(-1)
        tensor = as_tensor(values, tuple(param.shape), dtype, transposed[name])
        bound = name in oracle.slots and oracle.slots[name].bound
        trains = param.requires_grad if frozen else bound
        model.add(name, nn.Parameter(tensor, requires_grad=trains))
    oracle.deal_out()
    return Subject(before.setup, place, model, oracle.groups)


def resumed(
    before: Subject,
    oracle: Oracle,
    how: str,
    place: Place,
    seed: int,
    transposed: dict[str, bool],
    frozen: bool,
) -> Subject:
    """Go on with another model and optimizer in another place; brings the oracle there too."""
    _as_saved(oracle, how)
    if frozen:
        _forget_untouched(before, oracle)
    after = fresh(before, oracle, place, seed, transposed, frozen)
    lossless = oracle.converts_losslessly(place)
    if how in ("checkpoint", "full checkpoint", "background"):
        _by_checkpoint(before, after, how, lossless)
    else:
        _by_state_dict(before, after, how, lossless)
    oracle.keep_as(place)
    _carry_config(before, after)
    for name, param in before.params():
        after.model.param(name).requires_grad_(param.requires_grad)
    gone = weakref.ref(before.optimizer)
    before.close()
    assert gone() is None, "a deleted optimizer waits for the garbage collector"
    return after


def _as_saved(oracle: Oracle, how: str) -> None:
    if how.startswith("full"):
        oracle.widen()


def _forget_untouched(before: Subject, oracle: Oracle) -> None:
    for _, slot in oracle.order():
        if not before.model.param(slot.name).requires_grad and not saved_state(oracle, slot):
            slot.bound = False


def _by_state_dict(before: Subject, after: Subject, how: str, lossless: bool) -> None:
    state_dict = before.optimizer.state_dict(full_precision=how == "full precision")
    weights = before.model.state_dict()
    copied = COPIES.get(how, lambda value: value)
    state, model_state = copied(state_dict), copied(weights)
    after.model.load_state_dict(model_state)
    if not lossless:
        with refused("convert"):
            after.optimizer.load_state_dict(state)
    after.optimizer.load_state_dict(state, convert=not lossless)
    for source in (state, state_dict):
        _write_over(source)
    _write_over(weights)


def _write_over(value: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.fill_(3)
    elif isinstance(value, dict):
        for inner in list(value.values()):
            _write_over(inner)
    elif isinstance(value, list):
        for inner in value:
            _write_over(inner)


def _by_checkpoint(before: Subject, after: Subject, how: str, lossless: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, extra = Path(folder), {"tokens": 7}
        saved = checkpoint.save(
            path,
            before.model,
            before.optimizer,
            extra=extra,
            full_precision=how == "full checkpoint",
            asynchronous=how == "background",
        )
        _write_over(before.model.state_dict())
        _write_over(before.optimizer.state_dict())
        if how == "background":
            saved.wait()
        if not lossless:
            with refused("convert"):
                checkpoint.load(path, after.model, after.optimizer)
        assert checkpoint.load(path, after.model, after.optimizer, convert=not lossless) == extra


def _carry_config(before: Subject, after: Subject) -> None:
    for name in ("clip_grad", "grad_norm_skip_threshold"):
        setattr(after.optimizer.config, name, getattr(before.optimizer.config, name))


def rewound(subject: Subject, oracle: Oracle, model: Any, state: Any, then: Oracle) -> None:
    """Load an earlier state into the optimizer that is there; its form is the place's."""
    kept = copy.deepcopy(then)
    subject.model.load_state_dict(model, strict=False)
    lossless = kept.converts_losslessly(subject.place)
    subject.optimizer.load_state_dict(state, convert=not lossless)
    _write_over(state)
    _write_over(model)
    kept.keep_as(subject.place)
    for name, slot in oracle.slots.items():
        oracle.slots[name] = kept.slots.get(name, slot)
    for group, saved in zip(oracle.groups, kept.groups, strict=True):
        group.settings, group.tensor = saved.settings, saved.tensor
    if oracle.scaler is not None and kept.scaler is not None and not oracle.scaler.constant:
        scaler: Scaler = oracle.scaler
        scaler.scale, scaler.clean, scaler.left = (
            kept.scaler.scale,
            kept.scaler.clean,
            kept.scaler.left,
        )
