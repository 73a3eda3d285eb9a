"""``cls(params, ...)`` has the bits of the stack of ``get_megatron_optimizer`` for any settings."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mp_optim
from mp_optim import OptimizerConfig, get_megatron_optimizer

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "8bit": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "4bit": {"exp_avg_dtype": torch.uint4, "exp_avg_sq_dtype": torch.uint8},
}
MAINS: dict[str, dict[str, Any]] = {
    "fp32": {"store_param_remainders": False},
    "remainder16": {"store_param_remainders": True},
    "remainder8": {"store_param_remainders": True, "param_remainder_bits": 8},
}
RULES = {
    mp_optim.AdamW: {"optimizer": "adam"},
    mp_optim.Adam: {"optimizer": "adam", "decoupled_weight_decay": False},
    mp_optim.LAMB: {"optimizer": "lamb", "adam_eps": 1e-6},
    mp_optim.Lion: {"optimizer": "lion", "lion_beta1": 0.9, "lion_beta2": 0.99},
}


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(12, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 6))
    return layers.to(dtype)


def train(layers: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(6):
        x = torch.randn(16, 12, generator=generator)
        optimizer.zero_grad()
        layers(x.to(next(layers.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in layers.parameters()]


@given(
    rule=st.sampled_from(list(RULES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    form=st.sampled_from(list(FORMS)),
    main=st.sampled_from(list(MAINS)),
    offload=st.sampled_from([0.0, 0.5, 1.0]),
    mode=st.sampled_from(["sync", "overlap", "speculative", "streamed"]),
    limit=st.sampled_from([None, 0.05]),
    decay=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_optimizer_classes_give_the_bits_of_the_factory_for_random_settings(
    rule, dtype, form, main, offload, mode, limit, decay
):
    how = {"offload_place": mode} if mode == "streamed" else {"offload_mode": mode}
    placed = {"offload": offload, **how} if offload else {}
    mine = model(dtype)
    optimizer = rule(
        mine.parameters(),
        lr=1e-2,
        weight_decay=decay,
        state=form,
        main_params=main,
        max_grad_norm=limit,
        **placed,
    )
    config = OptimizerConfig(
        **RULES[rule],
        lr=1e-2,
        weight_decay=decay,
        bf16=dtype == torch.bfloat16,
        clip_grad=limit or 0.0,
        **_compact(rule, form, main, dtype),
        **_offloaded(offload, how),
    )
    other = model(dtype)
    groups = [{"params": list(other.parameters())}]
    theirs = get_megatron_optimizer(config, other, param_groups=groups)
    for one, two in zip(train(mine, optimizer), train(other, theirs), strict=True):
        assert torch.equal(one, two)


def _compact(rule: Any, form: str, main: str, dtype: torch.dtype) -> dict[str, Any]:
    if form == main == "fp32":
        return {}
    fields = {**FORMS[form], **(MAINS[main] if dtype == torch.bfloat16 else {})}
    if rule is mp_optim.Lion:
        fields.pop("exp_avg_sq_dtype", None)
    return {"use_precision_aware_optimizer": True, **fields}


def _offloaded(offload: float, how: dict[str, str]) -> dict[str, Any]:
    if not offload:
        return {}
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": offload, **how}


@pytest.mark.parametrize("mode", ["sync", "overlap", "speculative"])
def test_adamw_gives_each_dtype_equal_bits_alone_and_in_mixed_groups(mode):
    params = [
        nn.Parameter(torch.linspace(-1, 1, 300).to(dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    alone = [nn.Parameter(param.detach().clone()) for param in params]
    together = mp_optim.AdamW(params, lr=1e-2, offload=0.5, offload_mode=mode)
    others = [mp_optim.AdamW([param], lr=1e-2) for param in alone]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "float16 parameters")
        for _ in range(4):
            for param in (*params, *alone):
                param.grad = None
                param.square().sum().backward()
            for optimizer in (together, *others):
                optimizer.step()
    assert all(map(torch.equal, params, alone))
