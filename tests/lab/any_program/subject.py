"""The package under test: model and optimizer, built and looked at through the public API alone."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lab.any_program import foreigner
from lab.any_program.arithmetic import Array, F, Stored
from lab.any_program.oracle import Group, Oracle, Slot, equal_settings, same_bits
from lab.any_program.setups import FORMS, Param, Place, Setup
from mp_optim import OptimizerConfig, get_megatron_optimizer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class NotNow(Exception):
    """An operation has nothing to work on; it is passed over."""


def need(condition: Any) -> None:
    if not condition:
        raise NotNow


@contextmanager
def refused(saying: str = "") -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        assert saying in str(error), f"{saying!r} is not in {error}"
        return
    raise AssertionError("was not refused")


class Model(nn.Module):
    """Parameters without a purpose, dense ones and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.ParameterDict()
        self.experts = nn.ParameterDict()

    def add(self, name: str, param: nn.Parameter) -> None:
        kind, key = name.split(".")
        getattr(self, kind)[key] = param

    def param(self, name: str) -> nn.Parameter:
        kind, key = name.split(".")
        found: nn.Parameter = getattr(self, kind)[key]
        return found


def name_of(index: int, param: Param) -> str:
    return f"{'experts' if param.expert else 'dense'}.w{index}"


def dtype_of(param: Param, precision: str) -> str:
    return precision if param.half else "fp32"


def random_values(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    drawn = np.random.RandomState(seed).standard_normal(shape).astype(F) * F(0.5)
    return as_values(torch.from_numpy(np.asarray(drawn)).to(DTYPES[dtype]))


def as_values(tensor: Tensor) -> Array:
    wide = tensor.detach().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    return wide.contiguous().reshape(-1).numpy().copy()


def as_tensor(
    values: Array, shape: tuple[int, ...], dtype: str, transposed: bool = False
) -> Tensor:
    tensor = torch.from_numpy(values.copy()).reshape(shape).to(DTYPES[dtype])
    return tensor.t().contiguous().t() if transposed and tensor.dim() == 2 else tensor


def config_of(setup: Setup, place: Place) -> OptimizerConfig:
    fields: dict[str, Any] = {
        "optimizer": "sgd" if setup.rule == "foreign" else setup.rule,
        "ema_decay": setup.ema,
        "lr": 0.01,
        "weight_decay": 0.1,
        "clip_grad": setup.clip,
        "grad_norm_skip_threshold": setup.threshold,
        "log_num_zeros_in_grad": setup.count_zeros,
        "fused_backend": place.backend,
    }
    fields |= {"audit_rate": setup.audit, "audit_action": "raise"} if setup.audit else {}
    fields |= {setup.precision: True} if setup.precision != "fp32" else {}
    if setup.precision == "fp16":
        scale = (
            {"loss_scale": setup.scale}
            if setup.constant
            else {
                "initial_loss_scale": setup.scale,
                "loss_scale_window": setup.window,
                "hysteresis": setup.hysteresis,
            }
        )
        fields |= scale
    if place.fraction and setup.rule != "foreign":
        fields |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": place.fraction,
            "offload_mode": place.mode,
            "offload_place": place.where,
        }
        if place.where != "host" or place.on_disk:
            fields["stream_window_bytes"] = 1 << 16
        if place.on_disk:
            fields["optimizer_state_path"] = tempfile.gettempdir()
        elif place.where != "streamed":
            fields["overlap_cpu_optimizer_d2h_h2d"] = place.overlap
    if place.form != "plain":
        form = dict(FORMS[place.form])
        if setup.rule not in ("adam", "lamb"):
            form.pop("exp_avg_sq_dtype", None)
        fields |= {"use_precision_aware_optimizer": True, **form}
    return OptimizerConfig(**fields, **variant_of(setup), **setup.switches)


def variant_of(setup: Setup) -> dict[str, Any]:
    if not setup.variant or setup.rule == "foreign":
        return {}
    return {
        "adam": {"decoupled_weight_decay": False},
        "sgd": {"sgd_momentum": 0.0},
        "lion": {"lion_beta1": 0.5},
        "lamb": {"lamb_use_nvlamb": True, "lamb_grad_averaging": False},
    }[setup.rule]


class Subject:
    """A model and its optimizer in one place.

    Attributes:
        flushes: whether the program takes steps with denormal numbers flushed to zero.
    """

    flushes = False

    def __init__(
        self, setup: Setup, place: Place, model: Model, groups: list[Group] | None
    ) -> None:
        self.setup, self.place, self.model = setup, place, model
        config = config_of(setup, place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if setup.rule == "foreign":
                assert groups is not None
                given = self._explicit(groups)
                self.optimizer = foreigner.stack(setup, place, config, given)
            elif groups is None:
                self.optimizer = get_megatron_optimizer(config, model)
            else:
                self.optimizer = get_megatron_optimizer(
                    config, model, param_groups=self._explicit(groups)
                )

    def _explicit(self, groups: list[Group]) -> list[dict[str, Any]]:
        return [
            {
                "params": [self.model.param(name) for name in group.names],
                "param_names": list(group.names),
                "is_expert_parallel": group.expert,
                **self._given(group),
            }
            for group in groups
        ]

    def _given(self, group: Group) -> dict[str, Any]:
        keys = (
            ("lr", "weight_decay", "betas", "eps")
            if self.setup.rule in ("adam", "lamb")
            else ("lr", "weight_decay")
        )
        return {key: group.settings[key] for key in keys}

    def add_group(self, group: Group) -> None:
        params = [(name, self.model.param(name)) for name in group.names]
        self.optimizer.add_param_group(
            {"params": params, "is_expert_parallel": group.expert, **self._given(group)}
        )

    def close(self) -> None:
        self.model, self.optimizer = Model(), None  # type: ignore[assignment]

    # -- looking up -------------------------------------------------------------------------------

    def place_of(self, name: str) -> tuple[dict[str, Any], int]:
        for group in self.optimizer.param_groups:
            if name in group.get("param_names", ()):
                return group, group["param_names"].index(name)
        raise KeyError(name)

    def live_group(self, group: Group) -> dict[str, Any]:
        return self.place_of(group.names[0])[0]

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def grads(self) -> dict[str, Array]:
        found = {}
        for name, param in self.params():
            for attribute in ("main_grad", "decoupled_grad", "grad"):
                if (grad := getattr(param, attribute, None)) is not None:
                    found[name] = as_values(grad)
                    break
        return found

    def own_grads(self, oracle: Oracle) -> dict[str, Array]:
        grads = self.grads().items()
        return {name: grad for name, grad in grads if name in oracle.slots}

    def bind(self, oracle: Oracle) -> None:
        for name, param in self.params():
            slot = oracle.slots.get(name)
            if slot is not None and param.requires_grad and not slot.bound:
                slot.bound = True
                oracle.keep_slot_as(slot, self.place)

    # -- comparing --------------------------------------------------------------------------------

    def check_model(self, oracle: Oracle) -> None:
        for name, param in self.params():
            expected = oracle.slots[name].model if name in oracle.slots else oracle.outside[name]
            expect_bits(f"model parameter {name}", param, expected)

    def check_main_params(self, oracle: Oracle) -> None:
        named = dict(self.optimizer.named_main_params())
        assert list(named) == [slot.name for _, slot in oracle.order()]
        for name, main in named.items():
            slot = oracle.slots[name]
            assert main.dtype == (torch.float32 if slot.bound else self.model.param(name).dtype)
            expect_bits(f"main param {name}", main, slot.value())

    def check_state_dict(
        self, oracle: Oracle, state_dict: Mapping[str, Any], full_precision: bool = False
    ) -> None:
        assert len(state_dict["param_groups"]) == len(oracle.groups)
        for saved, group in zip(state_dict["param_groups"], oracle.groups, strict=True):
            assert list(saved["param_names"]) == group.names, (saved, group.names)
            check_settings(saved, group)
            for index, name in zip(saved["params"], group.names, strict=True):
                expected = saved_state(oracle, oracle.slots[name], full_precision)
                check_slot(name, state_dict["state"].get(index, {}), expected)
        if oracle.scaler and not oracle.scaler.constant:
            found = {key: float(value) for key, value in state_dict["grad_scaler"].items()}
            assert found == {
                "scale": oracle.scaler.scale,
                "growth_tracker": oracle.scaler.clean,
                "hysteresis_tracker": oracle.scaler.left,
            }


def expect_bits(what: str, tensor: Tensor, expected: Array) -> None:
    """Raise AssertionError with the first difference unless the bits are the same."""
    values = as_values(tensor).astype(F)
    if not same_bits(values, expected):
        where = next(
            (
                i
                for i in range(min(values.size, expected.size))
                if not same_bits(values[i : i + 1], expected[i : i + 1])
            ),
            0,
        )
        raise AssertionError(
            f"{what}[{where}] of {expected.size}: is {values[where : where + 1]}, "
            f"should be {expected[where : where + 1]}"
        )


def check_settings(saved: Mapping[str, Any], group: Group) -> None:
    for key, value in group.settings.items():
        now = saved[key]
        now = float(now) if isinstance(now, Tensor) else now
        assert equal_settings(now, value), (
            f"setting {key} of {group.names}: is {now!r}, should be {value!r}"
        )
    assert isinstance(saved["lr"], Tensor) == group.tensor, (
        f"lr of {group.names} is {saved['lr']!r}"
    )


def saved_state(oracle: Oracle, slot: Slot, full: bool = False) -> dict[str, Array]:
    return expected_state(
        slot, oracle.moment_names(slot), full, oracle.rule != "foreign", oracle.ema is not None
    )


def expected_state(
    slot: Slot, moments: tuple[str, ...], full: bool, counts: bool = True, averages: bool = False
) -> dict[str, Array]:
    if not slot.bound:
        return {}
    expected: dict[str, Array] = {"step": np.array([slot.step], F)}
    if not counts:
        expected.clear()
    if averages:
        average = slot.average
        expected["averaged_param"] = np.zeros_like(slot.value()) if average is None else average
    for name in moments:
        moment: Stored = slot.moments[name]
        if full or moment.scales is None:
            expected[name] = moment.values()
        else:
            expected |= {name: moment.codes, f"{name}_scale": moment.scales}
    if slot.main is not None or slot.lone or (slot.low is not None and full):
        expected["master_param"] = slot.value()
    elif slot.low is not None:
        expected["remainder"] = slot.low.astype(F)
    return expected


def check_slot(name: str, state: Mapping[str, Any], expected: Mapping[str, Array]) -> None:
    assert state.keys() == expected.keys(), (
        f"state of {name}: has {sorted(state)}, should have {sorted(expected)}"
    )
    for key, value in expected.items():
        expect_bits(f"state of {name}: {key}", state[key], value)
