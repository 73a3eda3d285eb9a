"""A step follows replaced, transposed or cut memory of a parameter, or refuses it by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import mp_optim
from mp_optim import FusedAdam, HybridDeviceOptimizer, OptimizerConfig, get_megatron_optimizer
from support.models import config_for
from support.places import PLACES, settings_of

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return settings_of(request.param, tmp_path)


def sgd(params: list[tuple[str, nn.Parameter]], **settings: Any) -> Any:
    return mp_optim.SGD(params, lr=1.0, **settings)


def zero_grads(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)


def pair(dtype: torch.dtype, *shape: int) -> list[tuple[str, nn.Parameter]]:
    made = (torch.arange(64.0).to(dtype).view(*shape) for _ in range(2))
    return [(name, nn.Parameter(values)) for name, values in zip("pq", made, strict=True)]


RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda t: t[:, :4],
    "flat": lambda t: t.view(-1),
    "larger": lambda t: torch.ones(16, 8, dtype=t.dtype),
}


def by_hand(param: Tensor, value: float) -> None:
    param.grad = torch.full_like(param, value)


def by_backward(param: Tensor, value: float) -> None:
    (param * value).sum().backward()


@pytest.mark.parametrize(
    ("gradients", "dtype"), [(by_hand, torch.float32), (by_backward, torch.bfloat16)]
)
@pytest.mark.parametrize("how", RESHAPES)
def test_step_raises_with_param_name_when_its_data_has_a_new_shape(how, dtype, gradients, place):
    named = pair(dtype, 8, 8)
    optimizer = sgd(named, momentum=0.9, **place)
    optimizer.describe()  # This call builds the optimizer, so its hooks see the first backward.
    for _, param in named:
        gradients(param, 0.0)
    optimizer.step()
    before = [param.detach().clone() for _, param in named]
    (_, p), (_, q) = named
    whole = p.data
    optimizer.zero_grad()
    gradients(q, 1.0)
    p.data = RESHAPES[how](p.data)
    gradients(p, 1.0)
    shape = str(tuple(p.shape)).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"p: .*changed from \(8, 8\) to {shape}"):
        optimizer.step()
    assert torch.equal(whole, before[0]) and torch.equal(q.detach(), before[1])
    p.grad = None
    p.data = whole
    gradients(p, 1.0)
    optimizer.step()
    assert torch.equal(p.detach(), (before[0].float() - 1).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_step_follows_a_param_changed_to_16_or_32_bits_and_refuses_64_bits(dtype, place):
    for other in (torch.float32, torch.bfloat16, torch.float64):
        named = pair(dtype, 8, 8)
        optimizer = sgd(named, **place)
        zero_grads(optimizer)
        optimizer.step()
        p = named[0][1]
        p.grad = None
        p.data = p.data.to(other)
        p.grad = torch.ones_like(p)
        if other == torch.float64:
            with pytest.raises(TypeError, match=r"p is torch\.float64"):
                optimizer.step()
            continue
        optimizer.step()
        assert p.dtype == other
        assert torch.equal(p.detach().float().view(-1), torch.arange(64.0) - 1)


def test_step_refuses_a_gradient_of_another_shape(place):
    for shape in ((4, 8), (4, 16), (16, 8)):
        named = pair(torch.float32, 8, 8)
        optimizer = sgd(named, **place)
        zero_grads(optimizer)
        optimizer.step()
        (_, p), (_, q) = named
        q.grad = torch.ones_like(q)
        p.grad.resize_(shape)
        with pytest.raises(ValueError, match=r"p: the gradient has the shape"):
            optimizer.step()
        assert torch.equal(q.detach().view(-1), torch.arange(64.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_step_refuses_params_and_gradients_with_freed_memory(dtype, place):
    for size, of_gradient in ((0, False), (8, False), (0, True)):
        named = pair(dtype, 8, 8)
        optimizer = sgd(named, **place)
        zero_grads(optimizer)
        optimizer.step()
        p = named[0][1]
        (p.grad if of_gradient else p).untyped_storage().resize_(size)
        with pytest.raises(ValueError, match=r"p: the .* memory was freed"):
            optimizer.step()


def test_step_refuses_an_expanded_param_before_any_param_changes(place):
    first = nn.Parameter(torch.ones(4))
    wide = nn.Parameter(torch.ones(4, 1).expand(4, 4))
    optimizer = sgd([("first", first), ("wide", wide)], **place)
    first.grad, wide.grad = torch.ones(4), torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"wide has shape \(4, 4\) .*share one address"):
        optimizer.step()
    assert first.detach().eq(1).all()
    frozen = nn.Parameter(torch.ones(4, 1).expand(4, 4), requires_grad=False)
    optimizer = sgd([("first", first), ("frozen", frozen)], **place)
    optimizer.step()
    frozen.requires_grad_()
    frozen.grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match="frozen has shape"):
        optimizer.step()
    assert first.detach().eq(0).all()


@pytest.mark.parametrize("make", [FusedAdam, HybridDeviceOptimizer])
def test_construction_refuses_params_that_share_memory(make):
    with pytest.raises(ValueError, match="wide has shape"):
        make([("wide", nn.Parameter(torch.ones(1).expand(4)))])
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight.data = model["a"].weight.data
    for attempt in (
        lambda: make(model.named_parameters()),
        lambda: get_megatron_optimizer(OptimizerConfig(lr=0.1), model),
    ):
        with pytest.raises(ValueError, match=r"a\.weight and b\.weight .*share memory"):
            attempt()


def test_step_refuses_params_that_share_memory_since_construction(place):
    named = pair(torch.bfloat16, 8, 8)
    optimizer = sgd(named, **place)
    zero_grads(optimizer)
    optimizer.step()
    (_, p), (_, q) = named
    q.data = p.data
    with pytest.raises(ValueError, match="p and q are two parameters that share"):
        optimizer.step()


def test_step_accepts_params_in_one_storage_without_overlap(place):
    memory = torch.arange(64.0).view(8, 8)
    named = [(str(index), nn.Parameter(view)) for index, view in enumerate(memory.split([3, 5]))]
    optimizer = sgd(named, **place)
    for _, param in named:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(memory, torch.arange(64.0).view(8, 8) - 1)
    columns = [(str(index), nn.Parameter(memory[:, index])) for index in range(2)]
    with pytest.raises(ValueError, match="0 and 1 are two parameters that share memory"):
        HybridDeviceOptimizer(columns, 1.0)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["zero", "fsdp"])
def test_sharded_step_follows_new_layouts_and_refuses_freed_memory(how, dtype, fraction, one_rank):
    model = nn.Linear(4, 4, bias=False).to(dtype)
    if how == "fsdp":
        fully_shard(model)
    settings = {"use_distributed_optimizer": how == "zero", "optimizer": "sgd", "sgd_momentum": 0.0}
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    config = config_for(precision, fraction, lr=1.0, clip_grad=0.0, weight_decay=0.0, **settings)
    optimizer = get_megatron_optimizer(config, model)
    param = model.weight

    def step(value: float) -> None:
        param.grad = torch.full_like(param, value)
        optimizer.step()
        optimizer.zero_grad()

    def held() -> Tensor:
        return param._local_tensor if how == "fsdp" else param

    step(0.0)
    values = held().detach().clone()
    held().data = held().data.t()
    step(0.0)
    assert torch.equal(held().detach(), values.t())
    held().data = held().data.contiguous().view(2, 8)
    with pytest.raises(ValueError, match=r"^weight.* \(2, 8\)"):
        optimizer.step()
    held().data = torch.ones(4, 4, dtype=dtype)
    held().untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^weight: .* memory was freed"):
        optimizer.step()
