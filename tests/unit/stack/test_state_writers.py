"""Writes by callers to tensors of ``optimizer.state`` take effect or are refused by name."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mp_optim
from mp_optim import (
    Float16OptimizerWithFloat16Params,
    FusedAdam,
    HybridDeviceOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from mp_optim.offload.backward_scheduler import WorkerError
from support.models import config_for, same_bits
from support.offload import differing, snapshot
from support.places import PLACES, settings_of

SHAPES = ((9, 130), (300,))


def build(place: str, state: str, folder: Path, **fields: Any) -> tuple[nn.ParameterList, Any]:
    settings = {**settings_of(place, folder), **fields}
    if place == "disk":
        # The larger parameter is divided into two windows.
        settings.setdefault("stream_window_bytes", 1 << 15)
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList(
        nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES
    )
    return model, mp_optim.AdamW(model.named_parameters(), lr=1e-2, state=state, **settings)


def train(model: nn.ParameterList, optimizer: Any, steps: range) -> None:
    for step in steps:
        backward(model, optimizer, step)
        optimizer.step()


def backward(model: nn.ParameterList, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    optimizer.zero_grad()
    factors = [torch.randn(p.shape, generator=generator).bfloat16() for p in model]
    products = [(p * f).float().sum() for p, f in zip(model, factors, strict=True)]
    torch.stack(products).sum().backward()


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_step_refuses_state_replaced_by_another_shape_or_dtype(place, wrong, tmp_path):
    model, optimizer = build(place, "fp32", tmp_path)
    train(model, optimizer, range(3))
    before = snapshot(model, optimizer)
    value = optimizer.state[model[1]]["exp_avg_sq"]
    value.data = value.data[:9].clone() if wrong == "shape" else value.data.bfloat16()
    with pytest.raises(
        (ValueError, WorkerError), match=r"the memory assigned to 1\.exp_avg_sq has shape"
    ):
        train(model, optimizer, range(3, 4))
    assert differing(snapshot(model, optimizer), before) == []
    train(model, optimizer, range(3, 4))
    other, undisturbed = build("device", "fp32", tmp_path)
    train(other, undisturbed, range(4))
    assert differing(snapshot(model, optimizer), snapshot(other, undisturbed)) == []


CONFIG = {"lr": 0.1, "bf16": True, "clip_grad": 0.0}
ZERO = OptimizerConfig(**CONFIG, use_distributed_optimizer=True)
STACKS: dict[str, Callable[[nn.Module], Any]] = {
    "Muon": lambda m: mp_optim.Muon(m.named_parameters(), lr=0.1),
    "FusedAdam": lambda m: FusedAdam(m.float().parameters(), lr=0.1),
    "Hybrid": lambda m: HybridDeviceOptimizer(m.parameters(), 0.5, lr=0.1),
    "ZeRO": lambda m: get_megatron_optimizer(ZERO, m),
    "FSDP2 8bit": lambda m: mp_optim.AdamW(fully_shard(m).parameters(), state="8bit"),
    "foreign": lambda m: Float16OptimizerWithFloat16Params(
        torch.optim.AdamW(m.parameters(), lr=0.1), OptimizerConfig(**CONFIG)
    ),
}
"""Optimizer stacks that the random programs never build."""


@pytest.mark.parametrize("name", STACKS)
def test_clear_of_optimizer_state_resets_moments_and_keeps_main_params(name, one_rank):
    torch.manual_seed(0)
    model = nn.Linear(6, 5).bfloat16()
    optimizer = STACKS[name](model)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 6, dtype=next(model.parameters()).dtype)).float().sum().backward()
        optimizer.step()

    def local(tensor: Any) -> Tensor:
        tensor = getattr(tensor, "local", tensor)
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    step()
    step()
    mains = {}
    if hasattr(optimizer, "named_main_params"):
        mains = {key: local(main).clone() for key, main in optimizer.named_main_params()}
    optimizer.state.clear()
    for state in optimizer.state.values():
        moments = {k: v for k, v in state.items() if k not in ("master_param", "remainder")}
        assert not any(local(value).float().any() for value in moments.values())
    if hasattr(optimizer, "named_main_params"):
        assert all(same_bits(local(m), mains[key]) for key, m in optimizer.named_main_params())
    step()
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    assert counts in ([1.0, 1.0], [])


@pytest.mark.parametrize("state", ["fp16", "8bit", "4bit"])
@pytest.mark.parametrize("layout", ["FSDP2", "ZeRO"])
def test_state_of_a_shard_takes_assigned_values_when_stored_in_blocks(layout, state, one_rank):
    torch.manual_seed(0)
    model = nn.Linear(20, 30, bias=False).bfloat16()
    if layout == "FSDP2":
        fully_shard(model)
        optimizer: Any = mp_optim.AdamW(model.parameters(), state=state)
    else:
        optimizer = get_megatron_optimizer(
            config_for(f"bf16-{state}", use_distributed_optimizer=True), model
        )

    def local(tensor: Any) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.local

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 20).bfloat16()).float().square().sum().backward()
        optimizer.step()

    step()
    shown = next(iter(optimizer.state.values()))
    for key, value in (("exp_avg", 0.0), ("exp_avg_sq", 4.0)):
        with pytest.raises(RuntimeError, match=r"read-only|Inplace update"):
            local(shown[key]).fill_(value)
        given = shown[key].clone()
        local(given).fill_(value)
        shown[key] = given
    saved = optimizer.state_dict(full_precision=True)["state"][0]
    assert not local(saved["exp_avg"]).any()
    assert bool(((local(saved["exp_avg_sq"]) - 4.0).abs() < 0.01).all())
    step()
    assert local(shown["exp_avg"]).any()


@pytest.mark.parametrize("state", ["fp16", "8bit", "4bit"])
def test_state_in_few_bits_raises_when_a_write_would_be_lost(state):
    param = nn.Parameter(torch.ones(300))
    optimizer = mp_optim.AdamW([("w", param)], state=state)
    param.grad = torch.ones_like(param)
    optimizer.step()
    writes: list[Callable[[Tensor], object]] = [
        lambda moment: moment.mul_(0.5),
        lambda moment: moment.data.mul_(0.5),
        lambda moment: moment.detach().mul_(0.5),
        lambda moment: moment.numpy().fill(0.5),
        lambda moment: moment.view(-1).numpy().fill(0.5),
        lambda moment: moment[:10].data.zero_(),
        lambda moment: moment.chunk(2)[0].detach().fill_(0.5),
        lambda moment: moment.__setitem__(0, 1.0),
        lambda moment: torch.add(moment, 1.0, out=moment),
        lambda moment: np.asarray(moment).fill(0.5),
        lambda moment: torch.fill_(input=moment, value=0.5),
        lambda moment: torch._foreach_mul_([moment], 0.5),
        lambda moment: setattr(moment, "data", torch.zeros(300)),
    ]
    for write in writes:
        with pytest.raises((RuntimeError, ValueError), match=r"read-only|Inplace update"):
            write(optimizer.state[param]["exp_avg"])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="read-only"):
        optimizer.state[param]["exp_avg"].view(-1).mul_(0.5)
    shown = optimizer.state[param]
    assert shown["exp_avg"].data.norm() == shown["exp_avg"].norm() > 0
    assert {**shown}.keys() == shown.copy().keys() == (shown | {}).keys() == {*reversed(shown)}
    assert type(shown["exp_avg"].shape) is torch.Size
    others = torch.broadcast_tensors(shown["exp_avg"], torch.ones(300))
    assert others[1].mul_(2).sum() == 600
    assert not nn.Parameter(shown["exp_avg"], requires_grad=False).requires_grad
    buffer = io.BytesIO()
    torch.save(optimizer.state[param]["exp_avg"], buffer)
    buffer.seek(0)
    assert same_bits(torch.load(buffer), optimizer.state[param]["exp_avg"])


@pytest.mark.parametrize("settings", [{}, {"offload": 1.0, "offload_mode": "speculative"}])
def test_adamw_gives_equal_bits_when_a_moment_is_replaced_by_a_transposed_tensor(settings):
    weights = []
    for transposed in (lambda value: value.t(), lambda value: value.t().contiguous()):
        param = nn.Parameter(torch.arange(64.0).reshape(8, 8))
        optimizer = mp_optim.AdamW([("square", param)], lr=1e-2, **settings)
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            param.grad = torch.randn(8, 8, generator=generator)
            optimizer.step()
            if seed == 1:
                moment = optimizer.state[param]["exp_avg"]
                moment.data = transposed(moment.data)
        weights.append(param.detach().clone())
    assert torch.equal(*weights)
