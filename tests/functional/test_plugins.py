"""Programs that find a class by its path, or load a plugin, build this package's optimizers."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mp_optim


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).bfloat16()


def fit(layers: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    losses = []
    for step in range(60):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.zero_grad()
        loss = (layers(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def test_builder_that_imports_module_and_class() -> None:
    """verl: ``optimizer_impl``, ``optimizer``, ``override_optimizer_config``."""
    override = {"offload": 1.0, "state": "8bit"}
    cls = getattr(importlib.import_module("mp_optim"), "AdamW")  # noqa: B009
    layers = model()
    arguments = {"lr": 1e-2, "weight_decay": 0.01, "betas": [0.9, 0.95], **override}
    first, last = fit(layers, cls(layers.parameters(), **arguments))
    assert last < 0.2 * first


def by_class_path(path: str, params: Any, lr: float, arguments: list[str]) -> Any:
    split = [argument.split("=") for argument in arguments]
    settings = {name: ast.literal_eval(value) for name, value in split}
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(params, lr=lr, **settings)


def test_builder_by_class_path_with_arguments_of_text() -> None:
    layers = model()
    adapters = [{"params": list(layers[0].parameters()), "lr": 1e-2}]
    adapters.append({"params": list(layers[2].parameters()), "lr": 2e-2})
    arguments = ["state='8bit'", "offload='1.0'", "betas=(0.9,0.95)", "weight_decay=0.01"]
    optimizer = by_class_path("mp_optim.AdamW", adapters, 1e-3, arguments)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
    assert optimizer.config.optimizer_offload_fraction == 1.0
    assert optimizer.state_dict()["state"] == {}  # parameters may still move to a device
    first, last = fit(layers, optimizer)
    assert last < 0.2 * first
    states = optimizer.state_dict()["state"].values()
    assert {state["exp_avg"].dtype for state in states} == {torch.int8}
    with pytest.raises(ValueError, match="stochastic_rounding='False': must be a bool"):
        by_class_path("mp_optim.AdamW", adapters, 1e-3, ["stochastic_rounding='False'"])


def test_builder_that_passes_params_by_name() -> None:
    """NeMo Automodel: ``_target_: mp_optim.AdamW``; ``foreach=False`` with tensor parallelism."""
    layers = model()
    optimizer = mp_optim.AdamW(
        params=[{"params": list(layers.parameters()), "weight_decay": 0.0}], lr=1e-2, foreach=False
    )
    first, last = fit(layers, optimizer)
    assert last < 0.2 * first


# -- plugins of Trainers ---------------------------------------------------------------------------


class Callback:
    """ms-swift's: creates what the Trainer would."""

    def __init__(self, args: Any, trainer: Any) -> None:
        self.args, self.trainer = args, trainer

    def create_optimizer(self, model: Any = None) -> Any:
        return Trainer.create_optimizer(self.trainer, model)


def stand_in(name: str, **content: Any) -> dict[str, ModuleType]:
    parts = name.split(".")
    modules = {}
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        modules[path] = ModuleType(path)
    vars(modules[name]).update(content)
    return modules


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    base = {"BasePlugin": type("BasePlugin", (), {})}
    swift = {"OptimizerCallback": Callback, "optimizers_map": {}}
    for modules in (
        stand_in("axolotl.integrations.base", **base),
        stand_in("swift.optimizers", **swift),
    ):
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
    yield
    for name in ("axolotl", "ms_swift"):
        sys.modules.pop(f"mp_optim.apps.integrations.{name}", None)


def trainer(folder: Path) -> Trainer:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    row = torch.arange(16) % 8
    return Trainer(
        LlamaForCausalLM(sizes).bfloat16(),
        TrainingArguments(
            str(folder),
            max_steps=50,
            logging_steps=1,
            learning_rate=5e-3,
            weight_decay=0.1,
            adam_beta2=0.95,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row}] * 400,
    )


def check_trained(trained: Trainer) -> None:
    trained.train()
    optimizer = trained.optimizer.optimizer  # below accelerate's
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert isinstance(optimizer, mp_optim.AdamW) and decays == [0.1, 0.0]
    assert optimizer.defaults["betas"] == (0.9, 0.95) and "host" in str(optimizer.describe())
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.usefixtures("programs")
def test_axolotls_plugin(tmp_path: Path) -> None:
    plugin = importlib.import_module("mp_optim.apps.integrations.axolotl")
    module, _, name = plugin.MpOptimPlugin().get_input_args().rpartition(".")
    arguments = getattr(importlib.import_module(module), name)
    chosen = arguments(mp_optim={"offload": 1.0, "state": "8bit"})
    trained = trainer(tmp_path)
    plugin.MpOptimPlugin().post_trainer_create(chosen, trained)
    check_trained(trained)


@pytest.mark.usefixtures("programs")
def test_ms_swifts_callback(tmp_path: Path) -> None:
    importlib.import_module("mp_optim.apps.integrations.ms_swift")
    callbacks = sys.modules["swift.optimizers"].optimizers_map
    trained = trainer(tmp_path)
    chosen = {"optim_args": "offload=1.0, state=8bit, main_params=remainder16"}
    arguments = SimpleNamespace(**{**vars(trained.args), **chosen})
    callback = callbacks["mp_optim"](arguments, trained)
    trained.create_optimizer = callback.create_optimizer  # as ms-swift's Trainer does
    check_trained(trained)
    arguments.optim_args = "offload"
    with pytest.raises(ValueError, match="'offload' is not of the form name=value"):
        callback.create_optimizer()
    arguments.optim_args = "optimizer=AdamX"
    with pytest.raises(ValueError, match="optimizer='AdamX': must be one of"):
        callback.create_optimizer()
