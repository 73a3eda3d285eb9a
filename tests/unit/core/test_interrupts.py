"""After an error in a step the optimizer is unchanged, or refuses further use."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mp_optim import checkpoint, get_megatron_optimizer
from mp_optim.core.interrupted_step import BrokenOffError
from mp_optim.kernels.native import NativeBackend
from mp_optim.kernels.reference import ReferenceBackend
from support.models import DTYPES, TinyMoE, config_for, is_expert, same_bits

STACKS: dict[str, dict[str, Any]] = {
    "in place": {},
    "reference": {"fused_backend": "reference"},
    "fp32": {"precision": "fp32"},
    "sync": {"fraction": 0.6},
    "overlap": {"fraction": 0.6, "offload_mode": "overlap"},
    "speculative": {"fraction": 0.6, "offload_mode": "speculative", "clip_grad": 0.0},
}


def built(settings: dict[str, Any]) -> tuple[nn.Module, Any]:
    settings = dict(settings)
    precision, fraction = (settings.pop("precision", "bf16"), settings.pop("fraction", 0.0))
    model = TinyMoE(DTYPES[precision.split("-")[0]])
    config = config_for(precision, fraction, **settings)
    return model, get_megatron_optimizer(config, model, expert_predicate=is_expert)


def backward(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(step)
    loss = sum(
        (param.float() * torch.randn(param.shape, generator=generator)).sum()
        for param in model.parameters()
    )
    optimizer.scale_loss(loss).backward()


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    state = optimizer.state_dict()
    tensors = [value for slot in state["state"].values() for value in slot.values()]
    tensors += [*model.state_dict().values(), *state.get("grad_scaler", {}).values()]
    return [value.detach().clone() for value in tensors]


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))


def failing(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let the kernels raise at call number ``call``, counted from 0."""
    calls = iter(range(1000))
    for backend in (NativeBackend, ReferenceBackend):

        def step(self: Any, *args: Any, original: Any = backend.step) -> None:
            original(self, *args)
            if next(calls) == call:
                raise RuntimeError("the kernels failed")

        monkeypatch.setattr(backend, "step", step)


@pytest.mark.parametrize("stack", ["in place", "sync", "overlap", "fp32"])
@pytest.mark.parametrize("call", [0, 1])
def test_optimizer_refuses_use_after_a_kernel_raised_during_an_in_place_step(
    stack, call, monkeypatch, tmp_path
):
    model, optimizer = built(STACKS[stack])
    backward(model, optimizer, 0)
    optimizer.step()
    checkpoint.save(tmp_path, model, optimizer)
    was = everything(model, optimizer)
    with monkeypatch.context() as patch:
        failing(patch, call)
        backward(model, optimizer, 1)
        with pytest.raises(RuntimeError, match="the kernels failed"):
            optimizer.step()
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: checkpoint.save(tmp_path, model, optimizer),
        lambda: list(optimizer.named_main_params()),
    ):
        with pytest.raises(
            BrokenOffError, match=r"interrupted by RuntimeError.*the kernels failed.*Load"
        ):
            use()
    checkpoint.load(tmp_path, model, optimizer)
    assert alike(everything(model, optimizer), was)
    backward(model, optimizer, 1)
    assert optimizer.step().success


NONSENSE = [
    ("lr", "x"),
    ("lr", float("nan")),
    ("lr", float("inf")),
    ("lr", -1.0),
    ("betas", 3),
    ("betas", (0.9, 2.0)),
    ("eps", None),
    ("weight_decay", torch.ones(2)),
    ("lr", torch.tensor(float("nan"))),
]


@pytest.mark.parametrize("stack", ["in place", "sync", "overlap", "speculative", "reference"])
def test_step_changes_nothing_when_a_group_setting_is_invalid(stack):
    model, optimizer = built(STACKS[stack])
    for step in range(2):
        backward(model, optimizer, step)
        optimizer.step()
    for group in range(len(optimizer.param_groups)):
        for name, value in NONSENSE:
            good = optimizer.param_groups[group][name]
            was = everything(model, optimizer)
            optimizer.param_groups[group][name] = value
            backward(model, optimizer, 2)
            with pytest.raises((ValueError, RuntimeError), match=f"{name}="):
                optimizer.step()
            optimizer.param_groups[group][name] = good
            assert alike(everything(model, optimizer), was), (group, name, value)
    backward(model, optimizer, 2)
    assert optimizer.step().success
