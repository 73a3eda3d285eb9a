"""The gradient reducer announces reduced buckets during backward."""

from typing import Any

import pytest
import torch
from torch import nn

from mp_optim import DistributedOptimizer, get_megatron_optimizer
from mp_optim.zero import grad_reducer
from support.models import config_for, same_bits
from support.two_threads import Narrow, backward_in_two_threads

pytestmark = pytest.mark.usefixtures("one_rank")


OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


def layers(count: int, **settings: Any) -> tuple[nn.Module, DistributedOptimizer]:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(count)))
    config = config_for(
        "fp32",
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        bucket_size=4,
        clip_grad=0.0,
        **settings,
    )
    optimizer = get_megatron_optimizer(config, model)
    return model, optimizer.chained_optimizers[0]


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


class Queued:
    """Stand-in for a queued reduction of one rank, which changes no gradient."""

    def __init__(self, under_way: list[int]) -> None:
        self._under_way = under_way
        under_way.append(len(under_way) + 1)

    def wait(self) -> None:
        self._under_way.pop()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    under_way: list[int] = []

    def start(*_: Any, exchange: bool, **__: Any) -> Queued:
        assert not exchange
        return Queued(under_way)

    monkeypatch.setattr(grad_reducer, "uses_exchange", lambda *_: False)
    monkeypatch.setattr(grad_reducer, "start_reduction", start)
    return under_way


def listened(optimizer: DistributedOptimizer, under_way: list[int]) -> list[int]:
    left: list[int] = []
    reducer = optimizer.grad_reducer
    tell = reducer.on_reduced
    assert tell is not None

    def listen(index: int) -> None:
        left.append(len(under_way))
        tell(index)

    reducer.on_reduced = listen
    return left


@pytest.mark.parametrize("mode", ["overlap", "speculative"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_reducer_announces_all_but_two_buckets_during_backward(nccl, mode, strategy):
    model, optimizer = layers(
        8, offload_mode=mode, data_parallel_sharding_strategy=strategy, **OFFLOADED
    )
    left = listened(optimizer, nccl)
    for step in range(1, 3):
        optimizer.zero_grad()
        backward(model)
        assert len(left) == 8 * step - 2 and len(nccl) == 2
        assert optimizer.step().success
        assert len(left) == 8 * step and not nccl
    assert max(left) == 1


def test_backward_waits_for_no_reduction_when_no_listener_is_set(nccl):
    for settings in ({}, {**OFFLOADED, "offload_mode": "sync"}):
        model, optimizer = layers(8, **settings)
        backward(model)
        assert len(nccl) == 8 and optimizer.grad_reducer.on_reduced is None
        assert optimizer.step().success and not nccl


def test_sharding_with_announced_buckets_gives_the_bits_of_one_process(nccl):
    model, optimizer = layers(8, offload_mode="speculative", **OFFLOADED)
    plain = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(8)))
    plain.load_state_dict(model.state_dict())
    reference = get_megatron_optimizer(config_for("fp32", clip_grad=0.0), plain)
    for _ in range(3):
        for module, stack in ((model, optimizer), (plain, reference)):
            stack.zero_grad()
            backward(module)
            assert stack.step().success
    for name, param in model.named_parameters():
        assert same_bits(param.detach(), plain.get_parameter(name).detach()), name


def test_reducer_launches_each_bucket_once_when_two_threads_run_backward(monkeypatch):
    place, launched, start = Narrow(), list[int](), grad_reducer.start_reduction

    def slow(grads: torch.Tensor, *rest: Any, **settings: Any) -> Any:
        launched.append(grads.data_ptr())
        place.passes()
        return start(grads, *rest, **settings)

    monkeypatch.setattr(grad_reducer, "start_reduction", slow)
    model, optimizer = layers(8)
    backward_in_two_threads(model[4:], model[:4], place)
    buckets = optimizer.grad_reducer.buckets
    assert place.most == 1 and len(launched) == 8
    assert set(launched) == {bucket.local_grads().data_ptr() for bucket in buckets}
    assert optimizer.step().success and len(launched) == 8
