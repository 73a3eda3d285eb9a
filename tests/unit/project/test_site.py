"""Pages of the site that show programs: every example is linked, and the shown lines run. ``mkdocs
build --strict`` checks links and docstrings in tools/test.sh."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from support.documents import blocks_of, lines_for
from support.launch import ROOT

DOCS = ROOT / "docs"


def test_docs_show_or_link_every_example_program() -> None:
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    programs = {path.name for path in (ROOT / "tools/examples").glob("*.py")}
    assert {name for name in programs if f"tools/examples/{name}" not in pages} == set()


# -- the lines of the pages ------------------------------------------------------------------------


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).bfloat16()


def train(model: nn.Module, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    before = [param.detach().clone() for param in model.parameters()]
    loss = model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)


GIVEN = SimpleNamespace(learning_rate=1e-5, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8)
"""The arguments of a training program that the lines read."""


class AnyTrainer:
    """Stand-in for a Trainer that takes or builds an optimizer."""

    def __init__(self, model: nn.Module, *arguments: Any, **given: Any) -> None:
        if "optimizers" in given:
            self.optimizer, _ = given["optimizers"]
            return
        cls, settings = given["optimizer_cls_and_kwargs"]
        self.optimizer = cls([{"params": list(model.parameters())}], **settings)

    def log(self, logs: dict[str, float]) -> None:
        """Accept logs, as a Trainer's method that callbacks override."""


class AnyModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()


def names(model: nn.Module) -> dict[str, Any]:
    trainers = ("Trainer", "SFTTrainer", "DPOTrainer")
    arguments = ("TrainingArguments", "SFTConfig", "DPOConfig")
    return {
        **dict.fromkeys(trainers, AnyTrainer),
        **dict.fromkeys(arguments, lambda folder, **given: GIVEN),
        "model": model,
        "base": model,
        "model_parts": [model],
        "data": [],
        "arguments": GIVEN,
        "accelerator": SimpleNamespace(prepare=lambda *objects: objects),
        "L": SimpleNamespace(LightningModule=AnyModule),
        "get_peft_model": lambda base, config: base,
        "LoraConfig": lambda **given: given,
    }


@pytest.mark.parametrize(
    "block",
    [
        blocks_of("../README.md", "python")[1],
        *blocks_of("clients/hf_trainer.md", "python"),
        blocks_of("clients/accelerate.md", "python")[0],
    ],
)
def test_integration_pages_have_python_blocks_that_train_a_model(block: str) -> None:
    model = small_model()
    known = names(model)
    exec(block, known)
    built = known["trainer"] if "trainer" in known else SimpleNamespace(**known)
    train(model, built.optimizer)


def test_lightning_page_has_a_module_that_trains() -> None:
    known = names(small_model())
    exec(blocks_of("clients/accelerate.md", "python")[1], known)
    student = known["Student"]()
    train(student.layers, student.configure_optimizers())


def test_torchtitan_page_has_a_container_that_trains() -> None:
    from torchtitan.components.optimizer import ParamGroupConfig

    from mp_optim.apps.integrations.torchtitan import MpOptimizersContainer

    (block,) = blocks_of("clients/torchtitan.md", "python")
    model = small_model()
    titan = {"ParamGroupConfig": ParamGroupConfig, "MpOptimizersContainer": MpOptimizersContainer}
    known = {**names(model), **titan}
    exec(block, known)
    train(model, known["optimizers"])


def built(module: str, name: str, **settings: Any) -> None:
    model = small_model()
    cls = getattr(importlib.import_module(module), name)
    train(model, cls(model.parameters(), **settings))


def test_config_lines_of_client_pages_name_importable_classes() -> None:
    (verl,) = map(yaml.safe_load, lines_for("verl, FSDP engine"))
    optim = verl["actor_rollout_ref"]["actor"]["optim"]
    others = optim["override_optimizer_config"]
    built(optim["optimizer_impl"], optim["optimizer"], lr=1e-2, **others)
    (recipe,) = map(yaml.safe_load, lines_for("NeMo Automodel"))
    module, _, name = recipe["optimizer"].pop("_target_").rpartition(".")
    built(module, name, **{**recipe["optimizer"], "lr": 1e-2})
    plugins, axolotl = map(yaml.safe_load, lines_for("axolotl"))
    module, _, name = plugins["plugins"][0].rpartition(".")
    source = importlib.util.find_spec(module)
    assert source is not None and source.origin is not None
    assert f"class {name}(" in Path(source.origin).read_text()
    settings = dict(axolotl["mp_optim"])
    built("mp_optim", settings.pop("optimizer"), lr=1e-2, **settings)


def test_class_path_lines_of_client_pages_build_an_optimizer() -> None:
    (line,) = lines_for("kohya's sd-scripts, musubi-tuner")
    _, path, _, *arguments = shlex.split(line)
    split = [argument.split("=") for argument in arguments]
    settings = {name: ast.literal_eval(value) for name, value in split}
    module, _, name = path.rpartition(".")
    built(module, name, lr=1e-2, **settings)


def test_ms_swift_line_of_the_docs_registers_our_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("swift.optimizers")
    vars(stand_in).update(OptimizerCallback=object, optimizers_map={})
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.optimizers", stand_in)
    (line,) = lines_for("ms-swift")
    monkeypatch.delitem(sys.modules, "mp_optim.apps.integrations.ms_swift", raising=False)
    importlib.import_module("mp_optim.apps.integrations.ms_swift")
    assert (
        list(vars(stand_in)["optimizers_map"]) == ["mp_optim"] and "--optimizer mp_optim " in line
    )
    arguments = re.search('--optim_args "(.*?)"', line)
    assert arguments is not None
    module = sys.modules.pop("mp_optim.apps.integrations.ms_swift")
    built("mp_optim", "AdamW", lr=1e-2, **vars(module)["settings_of"](arguments[1]))


def test_quickstart_page_resumes_to_the_uninterrupted_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    for block in blocks_of("quickstart.md", "python"):
        exec(block, known)
    said = capsys.readouterr().out
    assert "True" in said.splitlines() and known["resumed"] == known["uninterrupted"]
    assert re.search(r"host +bfloat16 +1 +1,024", said)
    assert known["resumed"] < 0.02 and known["success"]


def test_index_page_has_a_python_block_that_trains() -> None:
    (block,) = blocks_of("index.md", "python")
    known = names(small_model())
    exec(block, known)
    train(known["model"], known["optimizer"])
