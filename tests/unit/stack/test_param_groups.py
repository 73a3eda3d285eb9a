"""Param groups: additions, edits, assignments and switches take effect or are refused by name."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import mp_optim
from mp_optim import (
    ChainedOptimizer,
    FP32Optimizer,
    FusedAdam,
    HybridDeviceOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from support.models import same_bits

Named = list[tuple[str, nn.Parameter]]
ON_HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


class Pair(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for index, name in enumerate(("first", "second")):
            values = torch.linspace(-1, 1, 6).view(2, 3) + index
            self.register_parameter(name, nn.Parameter(values.to(dtype)))


def megatron(named: Named, **fields: Any) -> Any:
    model = nn.Module()
    for name, param in named:
        model.register_parameter(name, param)
    bf16 = named[0][1].dtype == torch.bfloat16
    config = OptimizerConfig(lr=0.1, bf16=bf16, clip_grad=1.0, **fields)
    return get_megatron_optimizer(config, model)


def stepped(optimizer: Any) -> Any:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    return optimizer


def chain(named: Named) -> Any:
    return ChainedOptimizer([megatron([pair]) for pair in named])


OPTIMIZERS: dict[str, tuple[torch.dtype, Callable[[Named], Any]]] = {
    "AdamW, new": (torch.bfloat16, lambda named: mp_optim.AdamW(named, lr=0.1)),
    "AdamW": (torch.bfloat16, lambda named: stepped(mp_optim.AdamW(named, lr=0.1))),
    "Muon": (torch.bfloat16, lambda named: stepped(mp_optim.Muon(named, lr=0.1))),
    "AdamW, speculative": (
        torch.bfloat16,
        lambda named: stepped(
            mp_optim.AdamW(named, lr=0.1, offload=1.0, offload_mode="speculative")
        ),
    ),
    "bf16": (torch.bfloat16, megatron),
    "bf16 on the host": (torch.bfloat16, lambda named: megatron(named, **ON_HOST)),
    "fp32": (torch.float32, megatron),
    "chain": (torch.bfloat16, chain),
    "over torch's": (
        torch.float32,
        lambda named: FP32Optimizer(torch.optim.AdamW(named, lr=0.1), OptimizerConfig(lr=0.1)),
    ),
    "Hybrid": (
        torch.float32,
        lambda named: HybridDeviceOptimizer(named, offload_fraction=0.5, lr=0.1),
    ),
    "FusedAdam": (torch.float32, lambda named: FusedAdam(named, lr=0.1)),
}


def late(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 2, dtype=dtype))


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))


def test_muon_add_param_group_adds_no_param_when_one_param_is_in_a_group_already():
    optimizer = mp_optim.Muon([("w", late(torch.float32))], lr=0.1)
    for built in (False, True):
        if built:
            stepped(optimizer)
        named = [("matrix", late(torch.float32)), ("w", optimizer.param_groups[0]["params"][0])]
        named += [("vector", nn.Parameter(torch.ones(2)))]
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": named})
        assert len(optimizer.param_groups) == 1
        stepped(optimizer)


class ListConfig(Sequence[Any]):
    """Sequence that is neither a list nor a tuple, like OmegaConf's."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_param_groups_accept_numpy_and_omegaconf_settings_with_equal_bits(kind, tmp_path):
    dtype, build = OPTIMIZERS[kind]
    results = []
    for number, betas in (
        (float, (0.5, 0.75)),
        (np.float64, ListConfig(0.5, np.float64(0.75))),
        (np.float64, np.array([0.5, 0.75])),
    ):
        pair = Pair(dtype)
        optimizer = build(list(pair.named_parameters()))
        pair.late = late(dtype)
        optimizer.add_param_group(
            {"params": [("late", pair.late)], "lr": number(0.25), "betas": betas}
        )
        schedule = LambdaLR(optimizer, lambda at, of=number: of(0.5) ** at)
        for _ in range(2):
            optimizer.param_groups[0]["weight_decay"] = number(0.125)
            stepped(optimizer)
            schedule.step()
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        optimizer.load_state_dict(torch.load(saved, weights_only=True))
        if isinstance(optimizer, MegatronOptimizer):
            path, extra = tmp_path / str(len(results)), {"best": number(0.5)}
            mp_optim.checkpoint.save(path, pair, optimizer, schedule, extra)
            assert mp_optim.checkpoint.load(path, pair, optimizer, schedule) == {"best": 0.5}
        stepped(optimizer)
        results.append([param.detach() for param in pair.parameters()])
    assert alike(results[0], results[1]) and alike(results[0], results[2])


EDITS: dict[str, Callable[[Any], Any]] = {
    "append": lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(1))),
    "pop": lambda groups: groups[0]["params"].pop(),
    "pop group": lambda groups: groups.pop(),
    "append group": lambda groups: groups.append({"params": [], "lr": 0.1}),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_param_group_lists_edited_in_place_are_refused_before_a_step(kind, edit):
    dtype, build = OPTIMIZERS[kind]
    pair = Pair(dtype)
    optimizer = stepped(build(list(pair.named_parameters())))
    for param in pair.parameters():
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in pair.parameters()]
    saved = copy.deepcopy(optimizer.state_dict())
    EDITS[edit](optimizer.param_groups)
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: list(optimizer.state),
        lambda: optimizer.load_state_dict(saved),
        lambda: optimizer.add_param_group({"params": [("late", late(dtype))]}),
        optimizer.step,
    ):
        with pytest.raises(ValueError, match=r"registered: .* by editing the lists\. Add a group"):
            use()
    assert alike(before, [param.detach() for param in pair.parameters()])


def put_back_as_lightning(optimizer: torch.optim.Optimizer) -> None:
    for param, state in optimizer.state.items():
        optimizer.state[param] = {key: value.to("cpu") for key, value in state.items()}


READERS: dict[str, Any] = {
    "none": lambda optimizer: None,
    "state": lambda optimizer: list(optimizer.state.items()),
    "put back": put_back_as_lightning,
    "describe": lambda optimizer: optimizer.describe(),
}
ADDITIONS: dict[str, Any] = {
    "assigned": lambda optimizer, group: setattr(
        optimizer, "param_groups", [optimizer.param_groups[0], group]
    ),
    "appended": lambda optimizer, group: optimizer.param_groups.append(group),
    "extended": lambda optimizer, group: optimizer.param_groups[0]["params"].extend(
        group["params"]
    ),
    "added": lambda optimizer, group: optimizer.add_param_group(
        {"params": group["params"], "lr": group["lr"]}
    ),
}


@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"offload": 0.5, "offload_mode": "speculative", "state": "8bit"}],
    ids=["plain", "offloaded"],
)
def test_param_groups_may_be_added_before_the_first_step_when_state_was_read(settings, addition):
    """Lightning's BaseFinetuning assigns more groups after Lightning has read the state."""
    results = []
    for read in READERS.values():
        pair = Pair(torch.bfloat16)
        first, *rest = pair.parameters()
        optimizer = mp_optim.AdamW([first], lr=0.1, **settings)
        read(optimizer)
        ADDITIONS[addition](optimizer, {**optimizer.param_groups[0], "params": rest, "lr": 0.2})
        read(optimizer)
        saved = copy.deepcopy(stepped(optimizer).state_dict())
        optimizer.load_state_dict(saved)
        results.append([param.detach() for param in stepped(optimizer).param_groups[-1]["params"]])
        with pytest.raises(ValueError, match="editing the lists"):
            optimizer.param_groups = optimizer.param_groups * 2
    assert all(alike(results[0], result) for result in results[1:])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_assigned_param_groups_set_the_rates_of_the_next_step(kind):
    dtype, build = OPTIMIZERS[kind]
    pair = Pair(dtype)
    optimizer = stepped(build(list(pair.named_parameters())))
    held = optimizer.param_groups
    before = [param.detach().clone() for param in pair.parameters()]
    groups = [{**group, "lr": 0.0, "weight_decay": 0.0} for group in held]
    optimizer.param_groups = groups
    stepped(optimizer)
    assert alike(before, [param.detach() for param in pair.parameters()])
    groups[0]["lr"] = 0.1
    stepped(optimizer)
    assert not alike(before, [param.detach() for param in pair.parameters()])
    assert held is optimizer.param_groups and held[0] is groups[0]
    for wrong, message in (
        (groups[1:], "added"),
        ([{"params": group["params"]} for group in groups], "group 0 has no lr"),
        (dict(groups[0]), "a list of dicts"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.param_groups = wrong
    assert held[0] is groups[0]


RULES = ["AdamW", "Adam", "LAMB", "Lion", "SGD", "Muon"]
SWITCHES = ["maximize", "amsgrad", "capturable", "differentiable"]


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("rule", RULES)
def test_unsupported_torch_switches_are_refused_by_construction_added_groups_and_loads(
    rule, switch
):
    build = getattr(mp_optim, rule)
    with pytest.raises(ValueError, match=f"{switch}=True"):
        build([{"params": [("w", late(torch.float32))], switch: True}])
    with pytest.raises(ValueError, match=f"{switch}=True"):
        build([("w", late(torch.float32))], **{switch: True})
    param = late(torch.float32)
    optimizer = stepped(build([("w", param)], lr=0.1))
    with pytest.raises(ValueError, match=f"{switch}=True"):
        optimizer.add_param_group({"params": [("x", late(torch.float32))], switch: True})
    state, before = copy.deepcopy(optimizer.state_dict()), param.detach().clone()
    state["param_groups"][0][switch] = True
    for saved in (state, {**state, "state": {}}):
        with pytest.raises(ValueError, match=f"{switch}=True.* state dict"):
            optimizer.load_state_dict(saved)
    optimizer.param_groups[0][switch] = True
    with pytest.raises(ValueError, match=f"{switch}=True.*nothing was stepped"):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.param_groups[0][switch] = False
    stepped(optimizer)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "over torch's"])
def test_torch_global_step_hooks_run_once_for_each_step(kind):
    dtype, build = OPTIMIZERS[kind]
    optimizer = stepped(build(list(Pair(dtype).named_parameters())))
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: seen.append(o)),
        register_optimizer_step_post_hook(lambda o, *_: seen.append(o)),
    ]
    try:
        stepped(optimizer)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [optimizer, optimizer]
