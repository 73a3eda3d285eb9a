"""Models in every offload mode, worker delays, and snapshots of a run."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mp_optim import HybridDeviceOptimizer, get_megatron_optimizer
from mp_optim.host.transfer import Transfer
from mp_optim.offload.backward_grads import BackwardJob
from mp_optim.offload.backward_scheduler import BackwardScheduler
from mp_optim.offload.buckets import Span
from support.models import (
    DTYPES,
    AdversarialTransfer,
    TinyMoE,
    config_for,
    is_expert,
    same_bits,
    tokens_of,
)

MODES = ("sync", "overlap", "speculative")


class CountingTransfer(Transfer):
    """A transfer that counts live host buffers and their bytes."""

    is_same_place = False

    def __init__(self) -> None:
        self._buffers: list[tuple[StorageWeakRef, int]] = []

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        buffer = super().empty_host(num_bytes, pin)
        self._buffers.append((StorageWeakRef(buffer.untyped_storage()), num_bytes))
        return buffer

    @property
    def held(self) -> int:
        return sum(size for storage, size in self._buffers if not storage.expired())


def hybrids(optimizer: Any) -> list[HybridDeviceOptimizer]:
    return [
        part.optimizer
        for part in optimizer.chained_optimizers
        if isinstance(part.optimizer, HybridDeviceOptimizer)
    ]


def schedules(optimizer: Any) -> list[BackwardScheduler]:
    found = [hybrid.stepper.schedule for hybrid in hybrids(optimizer)]
    return [schedule for schedule in found if schedule.runs_in_backward]


def build_mode(
    mode: str,
    precision: str = "bf16",
    fraction: float = 0.7,
    *,
    experts: bool = True,
    groups: int = 0,
    adversarial: bool = True,
    bucket_bytes: int = 256,
    seed: int = 0,
    **settings: Any,
) -> tuple[nn.Module, Any]:
    model = TinyMoE(DTYPES[precision.split("-")[0]], experts, seed)
    config = config_for(precision, fraction, offload_mode=mode, **settings)
    if groups:
        optimizer = get_megatron_optimizer(
            config, model, param_groups=different_groups(model, groups)
        )
    else:
        optimizer = get_megatron_optimizer(config, model, expert_predicate=is_expert)
    for hybrid in hybrids(optimizer):
        transfer = AdversarialTransfer() if adversarial else Transfer()
        hybrid.stepper.use_transfer(transfer, bucket_bytes)
    return model, optimizer


def spans_of_worker(optimizer: Any, stage: str) -> list[Span]:
    spans = [span for hybrid in hybrids(optimizer) for span in hybrid.timeline.last]
    return [span for span in spans if span.stage == stage and span.thread == "mp_optim-host"]


def finish_backward_work(optimizer: Any) -> float:
    for schedule in schedules(optimizer):
        schedule.worker.drain()
    return time.perf_counter()


def different_groups(model: nn.Module, count: int) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    groups = []
    for index in range(count):
        mine = named[index::count]
        rate = 1e-3 * (1 + index / 4)
        groups.append(
            {
                "params": [p for _, p in mine],
                "param_names": [n for n, _ in mine],
                "lr": torch.tensor(rate) if index % 2 else rate,
                "betas": (0.9 - index / 50, 0.99 - index / 500),
                "eps": 1e-8 * (1 + index),
                "weight_decay": 0.05 * index,
                "bias_correction": index % 3 != 1,
                "adam_w_mode": index % 2 == 0,
                "max_lr": rate,
                "min_lr": 0.0,
            }
        )
    return groups


@contextmanager
def delays(seconds: Sequence[float]) -> Iterator[None]:
    waits, run = itertools.cycle(seconds or (0.0,)), BackwardJob.run

    def slow(job: BackwardJob) -> None:
        time.sleep(next(waits))
        run(job)

    BackwardJob.run = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        BackwardJob.run = run  # type: ignore[method-assign]


def state_of(optimizer: Any) -> dict[str, Tensor]:
    return {
        f"{index}.{key}": value.detach().clone()
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    return {**state_of(optimizer), **params_of(model)}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [
        *(a.keys() ^ b.keys()),
        *(key for key in a.keys() & b.keys() if not same_bits(a[key], b[key])),
    ]


def run(
    model: nn.Module,
    optimizer: Any,
    steps: int,
    *,
    micro: int = 1,
    use_no_sync: bool = False,
    start: int = 0,
    scale: Callable[[int], float] = lambda step: 1.0,
    after_backward: Callable[[nn.Module, int], None] | None = None,
) -> list[Any]:
    found = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        losses = []
        for part in range(micro):
            loss = model(tokens_of(step * micro + part)) * (scale(step) / micro)
            if use_no_sync and part + 1 < micro:
                with optimizer.no_sync():
                    optimizer.scale_loss(loss).backward()
            else:
                optimizer.scale_loss(loss).backward()
            losses.append(loss.item())
        if after_backward is not None:
            after_backward(model, step)
        result = optimizer.step()
        found.append((losses, result.success, result.grad_norm))
    return found
