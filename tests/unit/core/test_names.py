"""Parameter names are those of the plain model, in every wrapper."""

from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import mp_optim
from mp_optim import (
    OptimizerConfig,
    ParamKey,
    ParamWithNamePredicate,
    get_megatron_optimizer,
    get_mup_config_overrides,
    get_standard_config_overrides,
)

pytestmark = pytest.mark.usefixtures("one_rank")


CONFIG = OptimizerConfig(lr=1e-2, bf16=True)


class Block(nn.Module):
    """A block with a buffer and a submodule called "module", a name that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("offset", torch.randn(8))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.module(hidden + self.offset).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.embed(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Model().bfloat16()


def compiled_in_place() -> nn.Module:
    model = plain()
    model.compile(backend="eager")
    return model


def layer_wrapped(wrap: Any) -> nn.Module:
    model = plain()
    model.layers[0] = wrap(model.layers[0])
    return model


def eager(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPS = {
    "plain": plain,
    "compiled in place": compiled_in_place,
    "compiled": lambda: eager(plain()),
    "a compiled layer": lambda: layer_wrapped(eager),
    "a checkpointed layer": lambda: layer_wrapped(checkpoint_wrapper),
    "compiled and checkpointed": lambda: layer_wrapped(
        lambda layer: eager(checkpoint_wrapper(layer))
    ),
    "DataParallel": lambda: nn.DataParallel(plain()),
    "DDP": lambda: nn.parallel.DistributedDataParallel(plain()),
    "compiled DDP": lambda: eager(nn.parallel.DistributedDataParallel(plain())),
    "DDP of a layer": lambda: layer_wrapped(nn.parallel.DistributedDataParallel),
}
NAMES = [name for name, _ in plain().named_parameters()]


def trained(model: nn.Module, steps: int = 1, **settings: Any) -> Any:
    stack = get_megatron_optimizer(CONFIG, model, **settings)
    step_on(model, stack, steps)
    return stack


def step_on(model: nn.Module, stack: Any, steps: int = 1) -> None:
    for seed in range(steps):
        stack.zero_grad()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(inputs).float().square().sum().backward()
        stack.step()


def names_of(stack: Any) -> list[str]:
    return sorted(name for group in stack.param_groups for name in group["param_names"])


@pytest.mark.parametrize("wrap", sorted(WRAPS))
def test_wrapped_model_exchanges_checkpoints_with_the_plain_model(wrap, tmp_path):
    model, bare = WRAPS[wrap](), plain()
    stack, expected = trained(model), trained(bare)
    assert names_of(stack) == sorted(NAMES) == sorted(name for name, _ in stack.named_main_params())
    seen: list[str] = []
    grouped = get_megatron_optimizer(
        CONFIG,
        WRAPS[wrap](),
        {ParamKey(name="layers.0.*"): {"max_lr": 1e-4}},
        expert_predicate=lambda _, name: bool(seen.append(name)),
    )
    assert set(seen) == set(NAMES)
    assert sorted(
        name
        for group in grouped.param_groups
        if group["lr"] == 1e-4
        for name in group["param_names"]
    ) == [name for name in sorted(NAMES) if name.startswith("layers.0.")]

    for saved, wanted in ((model, bare), (bare, model)):
        mine, others = (stack, expected) if saved is model else (expected, stack)
        mp_optim.checkpoint.save(tmp_path / str(saved is model), saved, mine)
        fresh_model = plain() if wanted is bare else WRAPS[wrap]()
        fresh = get_megatron_optimizer(CONFIG, fresh_model)
        mp_optim.checkpoint.load(tmp_path / str(saved is model), fresh_model, fresh)
        others.load_state_dict(mine.state_dict())
        assert all(
            torch.equal(a, b)
            for a, b in zip(fresh_model.parameters(), saved.parameters(), strict=True)
        )
        assert all(
            torch.equal(a, b) for a, b in zip(fresh_model.buffers(), saved.buffers(), strict=True)
        )
        step_on(fresh_model, fresh)
        step_on(saved, mine)
        assert all(
            torch.equal(a, b)
            for a, b in zip(fresh_model.parameters(), saved.parameters(), strict=True)
        )

    (file,) = mp_optim.checkpoint.export_safetensors(tmp_path / "export", stack)
    with safe_open(file, "pt") as found:
        assert sorted(found.keys()) == sorted(NAMES)


def test_param_names_start_with_chunk_index_for_several_model_chunks(tmp_path):
    chunks = [WRAPS["compiled"](), WRAPS["a checkpointed layer"]()]
    stack = get_megatron_optimizer(CONFIG, chunks)
    assert names_of(stack) == sorted(f"{index}.{name}" for index in (0, 1) for name in NAMES)
    mp_optim.checkpoint.save(tmp_path, chunks, stack)
    bare = [plain(), plain()]
    mp_optim.checkpoint.load(tmp_path, bare, get_megatron_optimizer(CONFIG, bare))


def test_param_groups_of_the_caller_get_parameter_names_of_the_model():
    model = eager(plain())
    named = list(model.named_parameters())
    for groups in (
        [{"params": [param for _, param in named]}],
        [{"params": named}],
        [{"params": [param for _, param in named], "param_names": [name for name, _ in named]}],
        [{"params": (param for _, param in named[:3])}, {"params": named[3:], "lr": 1e-3}],
    ):
        assert names_of(get_megatron_optimizer(CONFIG, model, param_groups=groups)) == sorted(NAMES)
    own = [(f"mine.{index}", param) for index, (_, param) in enumerate(named)]
    assert (
        names_of(get_megatron_optimizer(CONFIG, model, param_groups=[{"params": own}]))[0]
        == "mine.0"
    )


def test_add_param_group_takes_names_from_the_model():
    model = eager(plain())
    model.layers.requires_grad_(False)
    stack = get_megatron_optimizer(CONFIG, model)
    model.layers.requires_grad_(True)
    stack.add_param_group({"params": list(model.layers[0].parameters()), "lr": 1e-3})
    stack.add_param_group({"params": list(model.layers[1].named_parameters(prefix="layers.1"))})
    assert names_of(stack) == sorted(NAMES)
    step_on(model, stack)
    with pytest.raises(ValueError, match=r"shape \(3,\) is not in the model .*named_parameters"):
        stack.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_config_override_names_nearest_parameters_when_none_match(caplog):
    for key, message in (
        (
            ParamKey(name="layer.0.module.weight"),
            r"name='layer.0.*matches no.*'layers.0.module.weight'",
        ),
        (ParamKey(attr="is_special"), "attr='is_special'"),
        (
            ParamKey(with_name_predicate=ParamWithNamePredicate("never", lambda _, name: False)),
            "'never'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            get_megatron_optimizer(CONFIG, plain(), {key: {"wd_mult": 0.0}})
    config = OptimizerConfig(lr=1e-2, decoupled_lr=1e-3)
    matrix = nn.ParameterDict({"weight": nn.Parameter(torch.ones(2, 2))})
    get_megatron_optimizer(config, matrix, get_standard_config_overrides(config))
    get_megatron_optimizer(config, matrix, get_mup_config_overrides(config, 2.0, "sgd"))
    frozen = plain()
    frozen.embed.requires_grad_(False)
    get_megatron_optimizer(CONFIG, frozen, {ParamKey(name="embed.*"): {"wd_mult": 0.0}})
