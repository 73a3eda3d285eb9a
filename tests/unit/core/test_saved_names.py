"""Optimizer state by ``named_parameters()`` loads in every wrapper and with repeated names."""

import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import mp_optim
from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer

pytestmark = pytest.mark.usefixtures("one_rank")


class Block(nn.Module):
    """A block with a submodule called "module", a name that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.module(hidden))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(8, 8)).bfloat16()


def by_layer(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    model = plain()
    for index in range(len(model)):
        model[index] = wrap(model[index])
    return model


def eager(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "compiled": lambda: eager(plain()),
    "checkpointed layers": lambda: by_layer(checkpoint_wrapper),
    "DDP of compiled layers": lambda: nn.parallel.DistributedDataParallel(by_layer(eager)),
}


def built(model: nn.Module, named: bool = True, **settings: Any) -> mp_optim.AdamW:
    params = model.named_parameters() if named else model.parameters()
    return mp_optim.AdamW(params, lr=1e-2, **settings)


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8).bfloat16()).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    return [value.detach().clone() for value in (*model.parameters(), *state)]


PAIRS = [
    (saved, wanted)
    for saved, wanted in itertools.product(WRAPS, WRAPS)
    if [saved, wanted].count("plain") == 1
]


@pytest.mark.parametrize(("saved", "wanted"), PAIRS)
def test_adamw_state_loads_into_any_wrapping_of_the_model(saved, wanted, tmp_path):
    # DDP names start with "module.", which changes the random stream of a parameter.
    noisy = "DDP" not in saved + wanted
    settings = {"state": "bf16", "main_params": "remainder8", "stochastic_rounding": noisy}
    source = WRAPS[saved]()
    optimizer = built(source, **settings)
    step_on(source, optimizer)
    checkpoint.save(tmp_path, source, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(list(source.parameters()))
    step_on(source, optimizer)
    expected = bits(source, optimizer)

    model = WRAPS[wanted]()
    fresh = built(model, **settings)
    checkpoint.load(tmp_path, model, fresh)
    step_on(model, fresh)
    assert all(map(torch.equal, bits(model, fresh), expected))

    model = WRAPS[wanted]()
    with torch.no_grad():
        for param, value in zip(model.parameters(), weights, strict=True):
            param.copy_(value)
    fresh = built(model, **settings)
    fresh.load_state_dict(kept)
    step_on(model, fresh)
    assert all(map(torch.equal, bits(model, fresh), expected))


def in_other_order(model: nn.Module) -> mp_optim.AdamW:
    named = list(model.named_parameters())[::-1]
    return mp_optim.AdamW([{"params": named[:3]}, {"params": named[3:]}], lr=1e-2)


def test_checkpoint_takes_names_from_the_model_for_unnamed_parameters(tmp_path):
    model = plain()
    optimizer = built(model, named=False)
    step_on(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    step_on(model, optimizer)
    other = eager(plain())
    fresh = in_other_order(other)
    checkpoint.load(tmp_path, other, fresh)
    step_on(other, fresh)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    checkpoint.save(tmp_path, other, fresh)
    checkpoint.load(tmp_path, model, optimizer)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    step_on(other, fresh)
    step_on(model, optimizer)
    assert all(map(torch.equal, other.parameters(), model.parameters()))


@pytest.mark.parametrize("own", ["_orig_mod.{}", "mine.{}", None])
def test_checkpoint_load_finds_state_that_was_saved_under_param_group_names(
    own, tmp_path, monkeypatch
):
    model, called = plain(), (own or "{}").format

    def optimizer_of(model: nn.Module) -> mp_optim.AdamW:
        named = [(called(name), param) for name, param in model.named_parameters()]
        return mp_optim.AdamW(named if own else [param for _, param in named], lr=1e-2)

    optimizer = optimizer_of(model)
    step_on(model, optimizer)
    names = optimizer.param_groups[0].get("param_names")
    if own is None:
        names = [optimizer.slot_name(slot) for slot in optimizer.slots()]
    with monkeypatch.context() as patch:
        by_slot = dict(zip(optimizer.slots(), names, strict=True))
        patch.setattr("mp_optim.checkpoint.inventory.Inventory.names", by_slot)
        version = checkpoint.save(tmp_path, model, optimizer)
    entries = json.loads((version / "index.json").read_text())
    assert own is None or called("0.head.weight") in str(entries)
    other = plain()
    fresh = optimizer_of(other)
    checkpoint.load(tmp_path, other, fresh)
    assert all(map(torch.equal, bits(other, fresh), bits(model, optimizer)))


@pytest.mark.parametrize("how", ["one list", "two groups", "added"])
def test_checkpoint_loads_two_parameters_with_one_name(how, tmp_path):
    """Actor and critic in one optimizer have equal parameter names; torch saves and loads them."""
    torch.manual_seed(0)
    both = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]).bfloat16()
    actor, critic = both

    def build() -> mp_optim.AdamW:
        if how == "one list":
            return mp_optim.AdamW([*actor.named_parameters(), *critic.named_parameters()], lr=1e-2)
        groups = [{"params": list(net.named_parameters())} for net in (actor, critic)]
        optimizer = mp_optim.AdamW(groups[: 1 if how == "added" else 2], lr=1e-2)
        if how == "added":
            optimizer.add_param_group(groups[1])
        return optimizer

    optimizer = build()
    for net, factor in ((actor, 1.0), (critic, 3.0)):
        (factor * net(torch.ones(2, 8).bfloat16())).float().square().sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, both, optimizer)
    for source in ("state dict", "checkpoint"):
        fresh = build()
        if source == "checkpoint":
            checkpoint.load(tmp_path, both, fresh)
        else:
            fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(map(torch.equal, bits(both, fresh), bits(both, optimizer)))
    turned = copy.deepcopy(optimizer.state_dict())
    for group in turned["param_groups"]:
        group["param_names"].reverse()
    with pytest.raises(ValueError, match=r"is not unique.*order"):
        optimizer.load_state_dict(turned)
    with pytest.raises(ValueError, match=r"weight, bias: more than one .*ModuleList"):
        checkpoint.save(tmp_path / "other", nn.ModuleDict(), optimizer)
    assert not list(tmp_path.glob("other/*"))


def test_checkpoint_names_the_argument_when_arguments_are_swapped(tmp_path):
    model = plain()
    optimizer = built(model)
    theirs = torch.optim.AdamW(model.parameters())
    for name in ("save", "load"):
        call = getattr(checkpoint, name)
        for given, message in (
            ((tmp_path, optimizer, model), rf"model=AdamW: .* call {name}\(path, model, optim"),
            ((tmp_path, model.state_dict(), optimizer), "model=OrderedDict: .*not its state dict"),
            ((tmp_path, model, optimizer.state_dict()), "optimizer=dict: .*not its state dict"),
            ((model, optimizer, tmp_path), "path=Sequential: must be a path"),
            ((tmp_path, model, theirs), r"optimizer=AdamW: .*torch\.save"),
        ):
            with pytest.raises(TypeError, match=message):
                call(*given)
    assert not list(tmp_path.iterdir())


def test_set_optimizer_state_dict_refuses_state_that_needs_convert_true():
    for named in (True, False):
        model, other = plain(), plain()
        optimizer, fresh = built(model, named), built(other, named, state="bf16")
        step_on(model, optimizer)
        other.load_state_dict(model.state_dict())
        saved = get_optimizer_state_dict(model, optimizer)
        with pytest.raises(ValueError, match=r"load_state_dict\(\.\.\., convert=True\)"):
            set_optimizer_state_dict(other, fresh, copy.deepcopy(saved))
        fresh.load_state_dict(copy.deepcopy(saved), convert=True)
        for mine, theirs in zip(optimizer.state.values(), fresh.state.values(), strict=True):
            assert torch.equal(mine["exp_avg"].bfloat16(), theirs["exp_avg"])


class Tokens(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(rows, 4), nn.Linear(4, 10)

    def forward(self, _: Tensor) -> Tensor:
        return self.head(self.embed(torch.arange(10)))


@pytest.mark.parametrize("door", ["class", "factory"])
def test_checkpoint_refuses_a_parameter_resized_after_building(door, tmp_path):
    model = Tokens(10).bfloat16()
    config = OptimizerConfig(lr=1e-2, bf16=True)
    optimizer = built(model) if door == "class" else get_megatron_optimizer(config, model)
    step_on(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    before = sorted(tmp_path.rglob("*"))
    model.embed.weight = nn.Parameter(torch.zeros(12, 4).bfloat16())
    if door == "factory":
        with pytest.warns(UserWarning, match=r"does not train 1 .*: embed\.weight\. .*resized"):
            step_on(model, optimizer)
    step_on(model, optimizer)
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(ValueError, match=r"embed\.weight has the shape \(12, 4\) in the model"):
            call(tmp_path, model, optimizer)
    assert sorted(tmp_path.rglob("*")) == before


def test_save_writes_nothing_when_the_learning_rate_is_nan(tmp_path):
    model = plain()
    optimizer = built(model)
    checkpoint.save(tmp_path, model, optimizer)
    before = sorted(tmp_path.rglob("*"))
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="param group 0 of the saved state: lr=nan"):
        checkpoint.save(tmp_path, model, optimizer)
    assert sorted(tmp_path.rglob("*")) == before


def test_save_warns_once_when_the_optimizer_lacks_a_parameter(tmp_path, recwarn):
    model = Tokens(10).bfloat16()
    optimizer = built(model)
    model.head = nn.Linear(4, 10).bfloat16()
    for _ in range(2):
        checkpoint.save(tmp_path, model, optimizer)
    checkpoint.load(tmp_path, model, optimizer)
    (said,) = [
        str(warning.message) for warning in recwarn if "does not train" in str(warning.message)
    ]
    assert "2 of the model's 3 trainable parameters: head.weight, head.bias" in said
    recwarn.clear()
    averaged = copy.deepcopy(Tokens(10).bfloat16())
    checkpoint.save(tmp_path / "averaged", averaged, built(Tokens(10).bfloat16()))
    assert not recwarn.list


class Adapted(nn.Module):
    """A model that names only its adapter as parameter, and whose state dict has only the
    adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4)

    def named_parameters(self, *args: Any, **settings: Any) -> Any:
        return (
            (name, param)
            for name, param in super().named_parameters(*args, **settings)
            if name.startswith("adapter")
        )

    def state_dict(self, *args: Any, **settings: Any) -> Any:
        whole = super().state_dict(*args, **settings)
        return {name: value for name, value in whole.items() if name.startswith("adapter")}


def test_factory_trains_named_parameters_and_save_stores_all_when_a_model_overrides_both(tmp_path):
    model = Adapted().bfloat16()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True), model)
    names = [name for name, _ in optimizer.named_main_params()]
    assert names == ["adapter.weight", "adapter.bias"]
    base = model.base.weight.detach().clone()
    checkpoint.save(tmp_path, model, optimizer)
    model.base.weight.data.zero_()
    checkpoint.load(tmp_path, model, optimizer)
    assert torch.equal(model.base.weight, base)
