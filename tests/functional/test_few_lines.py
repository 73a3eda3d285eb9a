"""The lines of docs/clients/index.md that give a program our optimizer run here. Stand-ins replace
programs that cannot be installed with a CPU build of torch."""

import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mp_optim
from support.documents import blocks_of, lines_for

Known = dict[str, Any]
GIVEN = SimpleNamespace(
    learning_rate=1e-2, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.1
)
"""The arguments of a Trainer that the lines read."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).bfloat16()


def losses_of(layers: nn.Module, optimizer: Any, begin: int = 0, end: int = 60) -> list[float]:
    losses = []
    for step in range(begin, end):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.zero_grad()
        loss = (layers(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Trainer:
    def __init__(self, model: nn.Module, optimizer_cls_and_kwargs: Any, **rest: Any) -> None:
        cls, settings = optimizer_cls_and_kwargs
        self.optimizer = cls([{"params": list(model.parameters())}], **settings)


@dataclasses.dataclass
class Registered:
    """Stand-in for the registered config classes of lerobot and OLMo-core."""

    @classmethod
    def register(cls, name: str) -> Callable[[type], type]:
        return lambda chosen: chosen

    register_subclass = register

    def build(self, model: nn.Module) -> Any:
        groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
        return type(self).optimizer()(groups, **dataclasses.asdict(self))  # type: ignore[attr-defined]


class OptimConfig(BaseModel):
    """Stand-in for xtuner's class."""

    model_config = ConfigDict(extra="forbid")
    lr: float = 1e-5
    max_grad_norm: float = 1.0
    skip_grad_norm_threshold: float | None = None


class OptimizerPlugin:
    """Stand-in for the class of LLaMA-Factory, version 1."""

    known: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def register(self) -> Callable[[Any], Any]:
        return lambda built: self.known.setdefault(self.name, built)

    def __call__(self, *arguments: Any) -> Any:
        return self.known[self.name](*arguments)


class Manager:
    rounds = 0

    def start_quorum(self) -> None:
        self.rounds += 1

    def should_commit(self) -> bool:
        return self.rounds % 5 != 3


class OptimizerWrapper:
    """Stand-in for torchft's class."""

    def __init__(self, manager: Manager, optim: Any) -> None:
        self.manager, self.optim = manager, optim

    def zero_grad(self) -> None:
        self.manager.start_quorum()
        self.optim.zero_grad()

    def step(self) -> None:
        if self.manager.should_commit():
            self.optim.step()


STAND_INS: dict[str, dict[str, Any]] = {
    "skyrl.backends.skyrl_train.distributed": {
        "fsdp_strategy": ModuleType("fsdp_strategy", "Calls optim.AdamW.")
    },
    "llamafactory.train.sft": {"trainer": ModuleType("trainer")},
    "lerobot.optim.optimizers": {"OptimizerConfig": Registered},
    "olmo_core.optim": {"OptimConfig": Registered},
    "xtuner.v1.config.optim": {"OptimConfig": OptimConfig},
}
NAMES: Known = {
    "mp_optim": mp_optim,
    "partial": partial,
    "SimpleNamespace": SimpleNamespace,
    "OptimizerPlugin": OptimizerPlugin,
    "OptimizerWrapper": OptimizerWrapper,
    "SentenceTransformerTrainer": Trainer,
    "UnslothTrainer": Trainer,
    "param_groups_weight_decay": lambda model: [{"params": list(model.parameters())}],
    "prepare_model": lambda model: model,
    "arguments": GIVEN,
}
"""Names that the lines of the table expect in the reader's program."""


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, content in STAND_INS.items():
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name not in STAND_INS or name == path:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(content)


def by_skyrl(known: Known, model: nn.Module) -> Any:
    optim = known["fsdp_strategy"].optim
    return optim.AdamW(model.parameters(), lr=1e-2, betas=[0.9, 0.95], weight_decay=0.01)


def by_llama_factory(known: Known, model: nn.Module) -> Any:
    made = known["sft"].create_custom_optimizer(model, GIVEN, None)
    assert made.param_groups[0]["weight_decay"] == 0.1 and made.param_groups[0]["lr"] == 1e-2
    return made


def by_plugin(known: Known, model: nn.Module) -> Any:
    plugin = OptimizerPlugin("mp_adamw")
    return plugin(model, SimpleNamespace(name="mp_adamw", lr=1e-2))


def by_trainer(known: Known, model: nn.Module) -> Any:
    return known["trainer"].optimizer


def by_name(known: Known, model: nn.Module) -> Any:
    return known["optimizer"]


BUILDERS: dict[str, Callable[[Known, nn.Module], Any]] = {
    "SkyRL, FSDP": by_skyrl,
    "LLaMA-Factory": by_llama_factory,
    "LLaMA-Factory, version 1": by_plugin,
    "unsloth": by_trainer,
    "sentence-transformers": by_trainer,
    "diffusers": by_name,
    "timm": by_name,
    "torchft": by_name,
    "Ray Train": by_name,
}
"""Functions that return the optimizer of a table row after its lines have run."""
CONFIGS = {"LerobotAdamWConfig": True, "OlmoAdamWConfig": False, "XtunerAdamWConfig": False}
"""Config classes of the page; True if ``build`` takes parameters."""


def config_classes() -> Known:
    known: Known = {}
    for block in blocks_of("clients/index.md", "python"):
        exec(block, known)
    return known


def trained(model: nn.Module, optimizer: Any) -> mp_optim.AdamW:
    """Train until the loss has fallen; return our optimizer."""
    ours = getattr(optimizer, "optim", optimizer)  # torchft wraps the optimizer.
    assert isinstance(ours, mp_optim.AdamW)
    for group in ours.param_groups:
        group["lr"] = 1e-2
    losses = losses_of(model, optimizer)
    assert losses[-1] < 0.3 * losses[0]
    return ours


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("program", BUILDERS)
def test_client_lines_of_the_docs_train_with_our_optimizer(program):
    model = network()
    known = {**NAMES, "model": model, "manager": Manager(), "data": []}
    for line in lines_for(program):
        exec(line, known)
    ours = trained(model, BUILDERS[program](known, model))
    if program == "torchft":
        assert {float(state["step"]) for state in ours.state.values()} == {48.0}


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", CONFIGS)
def test_client_config_classes_build_an_optimizer_that_trains(name):
    model = network()
    taken = model.parameters() if CONFIGS[name] else model
    trained(model, config_classes()[name](lr=1e-2).build(taken))


def test_miles_lines_of_the_docs_replace_the_factory_that_miles_imports(tmp_path, monkeypatch):
    """miles imports Megatron's factory by name after ``install()``, so the name must be ours by
    then."""
    pytest.importorskip("megatron.core.optimizer")
    folder = tmp_path / "miles/backends/megatron_utils"
    folder.mkdir(parents=True)
    imports = "from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer\n"
    (folder / "model.py").write_text(imports)
    monkeypatch.syspath_prepend(str(tmp_path))
    known: Known = {}
    try:
        for line in lines_for("miles, slime"):
            exec(line, known)
        assert known["model"].get_megatron_optimizer.__module__.startswith("mp_optim.")
    finally:
        mp_optim.megatron.uninstall()  # type: ignore[attr-defined]
        for name in [name for name in sys.modules if name.split(".")[0] == "miles"]:
            del sys.modules[name]


def flattened(tree: Any, above: str = "") -> dict[str, Tensor]:
    if not isinstance(tree, dict):
        return {above[:-1]: tree}
    leaves: dict[str, Tensor] = {}
    for key, value in tree.items():
        leaves |= flattened(value, f"{above}{key}/")
    return leaves


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("main_params", ["fp32", "remainder16"])
def test_training_resumes_with_equal_losses_from_state_in_flat_safetensors(
    tmp_path, monkeypatch, main_params
):
    config = partial(config_classes()["LerobotAdamWConfig"], lr=1e-2)
    monkeypatch.setattr(mp_optim, "AdamW", partial(mp_optim.AdamW, main_params=main_params))
    model = network()
    optimizer = config().build(model.parameters())
    losses_of(model, optimizer, 0, 30)
    saved = optimizer.state_dict()
    groups = json.dumps(saved.pop("param_groups"))
    save_file(flattened(saved), tmp_path / "state.safetensors")
    weights = copy.deepcopy(model.state_dict())
    expected = losses_of(model, optimizer, 30, 60)

    model = network()
    model.load_state_dict(weights)
    optimizer = config().build(model.parameters())
    # Groups with remainders have checksums of the weights, which exist once state is initialized.
    if main_params != "fp32":
        optimizer.init_state()
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in load_file(tmp_path / "state.safetensors").items():
        _, position, key = name.split("/")
        state.setdefault(int(position), {})[key] = value
    fresh = optimizer.state_dict()["param_groups"]
    assert [group.keys() for group in json.loads(groups)] == [group.keys() for group in fresh]
    optimizer.load_state_dict({"state": state, "param_groups": json.loads(groups)})
    assert losses_of(model, optimizer, 30, 60) == expected
