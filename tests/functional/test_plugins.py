"""Programs that find a class by its path or load a plugin build this package's optimizers."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mp_optim


class Callback:
    """Stand-in for ms-swift's class, which creates the Trainer's optimizer."""

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
    optimizer = trained.optimizer.optimizer  # accelerate wraps the optimizer.
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert isinstance(optimizer, mp_optim.AdamW) and decays == [0.1, 0.0]
    assert optimizer.defaults["betas"] == (0.9, 0.95) and "host" in str(optimizer.describe())
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.usefixtures("programs")
def test_axolotl_plugin_trains_with_our_optimizer(tmp_path):
    plugin = importlib.import_module("mp_optim.apps.integrations.axolotl")
    module, _, name = plugin.MpOptimPlugin().get_input_args().rpartition(".")
    arguments = getattr(importlib.import_module(module), name)
    chosen = arguments(mp_optim={"offload": 1.0, "state": "8bit"})
    trained = trainer(tmp_path)
    plugin.MpOptimPlugin().post_trainer_create(chosen, trained)
    check_trained(trained)


@pytest.mark.usefixtures("programs")
def test_ms_swift_callback_trains_with_our_optimizer_and_refuses_bad_args(tmp_path):
    importlib.import_module("mp_optim.apps.integrations.ms_swift")
    callbacks = sys.modules["swift.optimizers"].optimizers_map
    trained = trainer(tmp_path)
    chosen = {"optim_args": "offload=1.0, state=8bit, main_params=remainder16"}
    arguments = SimpleNamespace(**{**vars(trained.args), **chosen})
    callback = callbacks["mp_optim"](arguments, trained)
    # ms-swift's Trainer assigns this method as well.
    trained.create_optimizer = callback.create_optimizer
    check_trained(trained)
    arguments.optim_args = "offload"
    with pytest.raises(ValueError, match="optim_args='offload': the equals sign is missing"):
        callback.create_optimizer()
    arguments.optim_args = "optimizer=AdamX"
    with pytest.raises(ValueError, match="optimizer='AdamX': must be one of"):
        callback.create_optimizer()
