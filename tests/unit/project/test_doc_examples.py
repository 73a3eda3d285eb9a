"""The Python blocks and commands of the documents run, in the order of their page."""

import ast
import dataclasses
import importlib
import importlib.util
import re
import shlex
import sys
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import mp_optim
from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.apps.cli.command import main
from support.documents import blocks_of, lines_for
from support.faults import faulty, written_wrong
from support.launch import ROOT
from support.universal import write_universal


def small_model():
    torch.manual_seed(0)  # Of 300 seeds, 7 make weights that one small step does not change.
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).bfloat16()


def loss_of(model):
    return model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()


def test_readme_example_steps_and_saves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = small_model()
    names = {"model": model, "loss": loss_of(model)}
    adamw, _, _ = blocks_of("../README.md", "python")
    exec(adamw, names)
    assert names["optimizer"].last_step.success and (tmp_path / "run" / "latest").exists()


@pytest.fixture
def one_rank(monkeypatch):
    """Set the environment of a job of one rank; end the process group after the test."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_llms_txt_examples_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.distributed.init_process_group("gloo")
    batch = torch.ones(2, 4)
    names = {
        "loss_of": lambda model: model(batch.to(model[0].weight.dtype)).float().square().mean(),
        "arguments": None,
        "Trainer": lambda model, arguments, optimizer_cls_and_kwargs: optimizer_cls_and_kwargs,
    }
    for block in blocks_of("llms.txt", "python"):
        names["model"] = small_model()
        exec(block, names)
    assert names["extra"] == {"step": 1} and names["success"]
    assert names["trainer"][0] is mp_optim.AdamW
    assert isinstance(names["optimizer"], mp_optim.Muon)


@pytest.mark.usefixtures("one_rank")
def test_many_ranks_and_fsdp2_examples_of_the_docs_take_steps():
    model = small_model()
    before = model[0].weight.detach().clone()
    names = {"model": model, "micro_batches": [0, 1, 2], "loss_of": lambda batch: loss_of(model)}
    (zero,) = blocks_of("many_ranks.md", "python")
    (fsdp2,) = blocks_of("fsdp2.md", "python")
    exec(zero, names)
    assert not torch.equal(model[0].weight.detach(), before)
    for block in (fsdp2, blocks_of("../README.md", "python")[2]):
        names["model"] = model = small_model()
        model.layers = [model[0]]
        exec(block, names)
        loss_of(model).backward()
        names["optimizer"].step()
        assert names["optimizer"].last_step.success


def test_checkpoint_examples_of_the_docs_run(tmp_path, monkeypatch):
    model = small_model()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True), model)
    loss_of(model).backward()
    optimizer.step()
    names = {
        "model": model,
        "optimizer": optimizer,
        "path": tmp_path / "PATH",
        "folder": tmp_path / "tensors",
    }
    for block in blocks_of("checkpoints.md", "python"):
        exec(block, names)
    assert names["extra"] == {} and list((tmp_path / "tensors").glob("*.safetensors"))
    mp_optim.checkpoint.save(tmp_path / "OTHER", model, optimizer)
    monkeypatch.chdir(tmp_path)
    for line in blocks_of("checkpoints.md", "bash")[0].strip().splitlines():
        words = shlex.split(line.replace("[", "").replace("]", ""), comments=True)
        assert words[:2] == ["mp-optim", "inspect"] and main(words[1:]) == 0


def test_audit_example_of_the_docs_restores_weights_after_a_fault(capsys, tmp_path, monkeypatch):
    settings, goes_back, digest, record = blocks_of("audit.md", "python")
    names = {}
    exec(settings, names)
    config = dataclasses.replace(names["config"], audit_rate=1.0, audit_action="raise")
    model = small_model()
    optimizer = mp_optim.get_megatron_optimizer(config, model)
    loss_of(model).backward()
    optimizer.step()
    mp_optim.checkpoint.save(tmp_path, model, optimizer)
    saved = [param.clone() for param in model.parameters()]
    names |= {"model": model, "optimizer": optimizer, "newest": tmp_path}
    loss_of(model).backward()
    with faulty(written_wrong("output", 3)):
        exec(goes_back, names)
    assert "element 3, param" in capsys.readouterr().out
    assert all(map(torch.equal, model.parameters(), saved))
    exec(digest, names)
    assert f"value={optimizer.step_digest().value}" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    exec(record, names)
    assert main(["replay", "record"]) == 0


def test_settings_examples_of_the_docs_set_the_overrides(capsys):
    overrides, plans = blocks_of("settings.md", "python")
    known = {"model": nn.ModuleDict({"router": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})}
    exec(overrides, known)
    settings = {(group["lr"], group["weight_decay"]) for group in known["optimizer"].param_groups}
    assert settings == {(3e-5, 0.01), (3e-5, 0.0), (3e-4, 0.0)}
    exec(plans, {"model": small_model()})
    assert "moments" in capsys.readouterr().out


def test_average_and_qk_clip_examples_of_the_docs_change_weights():
    (averages,) = blocks_of("recipes.md", "python")
    (clip,) = blocks_of("outside_writes.md", "python")
    model, seen = small_model(), []

    def train(model, optimizer):
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()

    def evaluate(model):
        seen.append(loss_of(model).item())

    names = {"model": model, "train": train, "evaluate": evaluate}
    exec(averages, names)
    assert seen[0] != loss_of(model).item()
    attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("query", "key")})
    model = nn.ModuleDict({"attention": attention})
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0, clip_grad=0.0), model)
    before = attention["query"].weight.detach().clone()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    logits = torch.tensor([50.0, 400.0])
    exec(clip, {"optimizer": optimizer, "limit": 100, "largest_logit": logits, "head_dim": 4})
    halved = torch.tensor([1.0] * 4 + [0.5] * 4).view(8, 1)
    assert torch.equal(attention["query"].weight, before * halved)


def test_health_examples_of_the_docs_log_gradient_norms():
    model, blocks = small_model(), blocks_of("health.md", "python")
    found = {
        "model": model,
        "batches": [(torch.ones(2, 4, dtype=torch.bfloat16), 0.0)] * 2,
        "loss_function": lambda outputs, target: (outputs.float() - target).square().mean(),
    }
    for block in blocks:
        exec(block, found)
    metrics = found["optimizer"].metrics()
    assert metrics["steps"] == 2 and "param_grad_norm/0.weight" in metrics


def test_delta_examples_of_the_docs_copy_the_weights(tmp_path):
    trainer, reader, quantized = blocks_of("deltas.md", "python")
    model = nn.Sequential(OrderedDict(q_proj=nn.Linear(4, 4), o_proj=nn.Linear(4, 3))).bfloat16()
    receiver = deepcopy(model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True), model)
    loss_of(model).backward()
    known = {"optimizer": optimizer, "model": model, "folder": tmp_path, "replica": receiver}
    exec(trainer, known)
    assert known["delta"].changed > 0
    exec(reader, known)
    pairs = zip(model.parameters(), receiver.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    optimizer.track_changes()
    loss_of(model).backward()
    optimizer.step()
    exec(quantized, known)
    assert {"q_proj.weight", "o_proj.weight"} <= {patch.name for patch in known["codes"].patches}


def test_tenant_example_of_the_docs_steps_and_saves_two_tenants(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ann, bob = small_model(), small_model()
    loss_of(ann).backward()
    (block,) = blocks_of("tenants.md", "python")
    known = {"ann": ann, "bob": bob, "loss": loss_of(bob)}
    exec(block, known)
    assert {name: result.success for name, result in known["results"].items()} == {
        "ann": True,
        "bob": True,
    }
    assert list(known["optimizer"]) == ["bob"] and (tmp_path / "ann.pt").exists()


class FromElsewhere:
    def __init__(self, model):
        params = list(model.parameters())
        self.param_groups_master = [{"params": [param.detach().float() for param in params]}]
        self._inner = {
            "state": {
                i: {"exp_avg": torch.ones(p.shape), "exp_avg_sq": torch.ones(p.shape)}
                for i, p in enumerate(params)
            },
            "param_groups": [{"lr": 1e-3, "step": 2, "params": list(range(len(params)))}],
        }


class Megatron(FromElsewhere):
    """Stand-in for Megatron's optimizer: the groups hold FP32 copies, and ``main_param`` of each
    parameter is its copy."""

    def __init__(self, model):
        super().__init__(model)
        self.param_groups = self.param_groups_master
        self.model = model

    @property
    def optimizer(self):
        for param, copy in zip(
            self.model.parameters(), self.param_groups[0]["params"], strict=True
        ):
            # An optimizer of ours replaced ``main_param`` since.
            param.main_param = copy
        return self

    def state_dict(self):
        return {
            "optimizer": self._inner,
            "fp32_from_fp16_params": [g["params"] for g in self.param_groups_master],
        }


class Apex(FromElsewhere):
    def state_dict(self):
        return self._inner


def train_some_steps(model, fp32, optimizer):
    model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean().backward()
    for name, param in model.named_parameters():
        fp32[name].grad = param.grad.float()
    optimizer.step()


def test_migration_page_examples_convert_state_in_order(tmp_path, monkeypatch):
    """Python blocks run unchanged, and commands run with the arguments of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).bfloat16()
    names = {
        "model": model,
        "train_some_steps": train_some_steps,
        "megatron_optimizer": Megatron(model),
        "fused_adam": Apex(model),
    }
    keys = ("fp32", "exp_avg", "exp_avg_sq")
    given = {
        name: dict.fromkeys(keys, torch.ones(param.shape))
        for name, param in model.named_parameters()
    }
    write_universal(tmp_path / "universal", given)
    blocks = re.findall(
        r"```(python|bash)\n(.*?)```", (ROOT / "docs/migrate.md").read_text(), re.DOTALL
    )
    for language, block in blocks:
        if language == "python":
            exec(block, names)
            continue
        for line in block.strip().splitlines():
            words = shlex.split(line)
            assert words[:2] == ["mp-optim", "convert"] and main(words[1:]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert {
        "from_torch.pt",
        "from_megatron.pt",
        "from_apex.pt",
        "from_deepspeed.pt",
        "for_torch",
    } <= written
    convert = names["convert"]
    for source in ("from_megatron.pt", "from_apex.pt"):
        convert.import_state(names["optimizer"], convert.from_file(tmp_path / source))
        assert all(
            float(state["step"]) == 2.0
            for state in convert.export_state(names["optimizer"]).state.values()
        )


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
def test_integration_pages_have_python_blocks_that_train_a_model(block):
    model = small_model()
    known = names(model)
    exec(block, known)
    built = known["trainer"] if "trainer" in known else SimpleNamespace(**known)
    train(model, built.optimizer)


def test_lightning_page_has_a_module_that_trains():
    known = names(small_model())
    exec(blocks_of("clients/accelerate.md", "python")[1], known)
    student = known["Student"]()
    train(student.layers, student.configure_optimizers())


def test_torchtitan_page_has_a_container_that_trains():
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


def test_config_lines_of_client_pages_name_importable_classes():
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


def test_class_path_lines_of_client_pages_build_an_optimizer():
    (line,) = lines_for("kohya's sd-scripts, musubi-tuner")
    _, path, _, *arguments = shlex.split(line)
    split = [argument.split("=") for argument in arguments]
    settings = {name: ast.literal_eval(value) for name, value in split}
    module, _, name = path.rpartition(".")
    built(module, name, lr=1e-2, **settings)


def test_ms_swift_line_of_the_docs_registers_our_optimizer(monkeypatch):
    stand_in = ModuleType("swift.optimizers")
    vars(stand_in).update(OptimizerCallback=object, optimizers_map={})
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.optimizers", stand_in)
    (line,) = lines_for("ms-swift")
    monkeypatch.delitem(sys.modules, "mp_optim.apps.integrations.ms_swift", raising=False)
    importlib.import_module("mp_optim.apps.integrations.ms_swift")
    assert list(vars(stand_in)["optimizers_map"]) == ["mp_optim"]
    assert "--optimizer mp_optim " in line
    arguments = re.search('--optim_args "(.*?)"', line)
    assert arguments is not None
    module = sys.modules.pop("mp_optim.apps.integrations.ms_swift")
    built("mp_optim", "AdamW", lr=1e-2, **vars(module)["settings_of"](arguments[1]))


def test_quickstart_page_resumes_to_the_uninterrupted_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    for block in blocks_of("quickstart.md", "python"):
        exec(block, known)
    printed = capsys.readouterr().out
    assert "True" in printed.splitlines() and known["resumed"] == known["uninterrupted"]
    assert re.search(r"host +bfloat16 +1 +1,024", printed)
    assert known["resumed"] < 0.02 and known["success"]


def test_index_page_has_a_python_block_that_trains():
    (block,) = blocks_of("index.md", "python")
    known = names(small_model())
    exec(block, known)
    train(known["model"], known["optimizer"])
