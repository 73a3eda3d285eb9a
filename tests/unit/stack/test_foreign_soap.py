"""SOAP of the package pytorch_optimizer, whose state is matrices in lists, below the wrappers."""

import pytest
import torch
from torch import nn

from mp_optim import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    HybridDeviceOptimizer,
    checkpoint,
)
from support.models import config_for, same_bits

SOAP = pytest.importorskip("pytorch_optimizer").SOAP
SETTINGS = {"lr": 1e-2, "precondition_frequency": 2}
SHAPES = [(6, 4), (4,), (3, 5), (2, 3, 4)]


@pytest.fixture(autouse=True)
def one_thread():
    """The bits of matrix products may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def params_of(dtype):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def alone(dtype, steps):
    """SOAP over FP32 copies, kept by hand."""
    params = params_of(dtype)
    copies = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = SOAP(copies, **SETTINGS)
    for step in range(steps):
        for copy, grad in zip(copies, gradients(step, dtype), strict=True):
            copy.grad = grad.float()
        optimizer.step()
    return [copy.detach().to(dtype) for copy in copies]


def hybrid(params):
    return HybridDeviceOptimizer(
        params, offload_fraction=0.5, cpu_optimizer_cls=SOAP, gpu_optimizer_cls=SOAP, **SETTINGS
    )


def wrapped(params, dtype, placed=False):
    inner = hybrid(params) if placed else SOAP(params, **SETTINGS)
    if dtype == torch.float32:
        return FP32Optimizer(inner, config_for("fp32", clip_grad=0.0))
    config = config_for("bf16", clip_grad=0.0)
    return Float16OptimizerWithFloat16Params(inner, config, None)


def train(optimizer, params, dtype, steps):
    for step in steps:
        for param, grad in zip(params, gradients(step, dtype), strict=True):
            param.grad = grad
        assert optimizer.step().success


@pytest.mark.parametrize("placed", [False, True], ids=["in place", "half on the host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_steps_main_params_as_if_it_were_alone(dtype, placed):
    params = params_of(dtype)
    train(wrapped(params, dtype, placed), params, dtype, range(7))
    expected = alone(dtype, 7)
    assert all(same_bits(a.detach(), b) for a, b in zip(params, expected, strict=True))
    assert not any(same_bits(a.detach(), b) for a, b in zip(params, params_of(dtype), strict=True))


def test_a_checkpoint_holds_all_of_its_state(tmp_path):
    model = nn.ParameterList(params_of(torch.bfloat16))
    optimizer = wrapped(list(model), torch.bfloat16)
    train(optimizer, list(model), torch.bfloat16, range(4))
    checkpoint.save(tmp_path, model, optimizer)
    model = nn.ParameterList(params_of(torch.bfloat16))
    optimizer = wrapped(list(model), torch.bfloat16)
    checkpoint.load(tmp_path, model, optimizer)
    train(optimizer, list(model), torch.bfloat16, range(4, 7))
    expected = alone(torch.bfloat16, 7)
    assert all(same_bits(a.detach(), b) for a, b in zip(model, expected, strict=True))
