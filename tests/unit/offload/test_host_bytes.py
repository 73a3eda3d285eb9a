"""Offloading allocates the planned bytes of host memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.apps.fit.model_plan import plan
from mp_optim.host.host_memory import page_locked_bytes
from support.offload import MODES, CountingTransfer, hybrids


def model_of(dtype: torch.dtype) -> nn.Module:
    shapes = [(64, 100), (7,), (300, 30), (1,), (129, 65), (40_000,)]
    torch.manual_seed(0)
    return nn.ParameterList(torch.randn(shape).to(dtype) for shape in shapes)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.stack([param.float().square().sum() for param in model.parameters()]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 64 << 20])
@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "compact"])
@pytest.mark.parametrize("mode", MODES)
def test_offload_holds_the_planned_bytes_of_host_memory_after_steps(
    mode: str, precision: str, pipelined: bool, bucket_bytes: int
) -> None:
    compact = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "uint8"}
    config = OptimizerConfig(
        lr=1e-3,
        bf16=precision != "fp32",
        clip_grad=0.0,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
        offload_mode=mode,
        overlap_cpu_optimizer_d2h_h2d=pipelined,
        offload_bucket_bytes=bucket_bytes,
        **(compact if precision == "compact" else {}),
    )
    model = model_of(torch.float32 if precision == "fp32" else torch.bfloat16)
    optimizer = get_megatron_optimizer(config, model)
    (hybrid,) = hybrids(optimizer)
    transfer = CountingTransfer()
    hybrid.stepper.use_transfer(transfer)
    planned = hybrid.stepper.host_bytes()
    rank = plan(model, config)
    staging = rank.pinned_host.staging + rank.pageable_host.staging
    assert staging == sum(map(page_locked_bytes, planned.staging))
    back_mains, back_state = (rank.pinned_host.double_buffers, rank.pageable_host.double_buffers)
    assert back_mains == sum(map(page_locked_bytes, planned.back_mains))
    assert back_state == sum(planned.back_state)
    take_steps = partial(step, model, optimizer)
    for _ in range(4):
        take_steps()
    held = hybrid.stepper.host_bytes()
    assert transfer.held == sum(map(sum, planned)) == sum(map(sum, held))
    assert (sum(planned.back_mains) > 0) == (mode == "speculative")
