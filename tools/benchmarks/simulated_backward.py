"""A model whose backward takes as long as it is told to, with its whole optimizer on the host,
over a bus that may be simulated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim import (
    HybridDeviceOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from mp_optim.mixed_precision.wrapped_optimizer import WrappedOptimizer

_CLIP = {"off": 0.0, "on, not firing": 1e9, "always firing": 1e-3}


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        params, tensors: size of the model. backward: ``sleep`` or ``busy``. bus: GB/s, or 0. clip:
            see ``_CLIP``.
    """

    params: int
    tensors: int
    backward: str
    bus: float
    clip: str

    @property
    def title(self) -> str:
        bus = f"bus {self.bus:g} GB/s" if self.bus else "no bus"
        return (
            f"{self.params / 1e6:g} M parameters in {self.tensors} tensors, backward "
            f"{self.backward}s, {bus}, "
            f"clipping {self.clip}"
        )


class Bus:
    """A transfer that takes as long as a bus would: each direction is one lane, and copies queue up
    in it."""

    is_same_place = False

    def __init__(self, gigabytes: float) -> None:
        self._rate = gigabytes * 1e9
        self._free_at = {"down": 0.0, "up": 0.0}

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def notes(self) -> tuple[str, ...]:
        return ()

    def mark(self) -> None: ...

    def _copy(self, lane: str, to: Sequence[Tensor], sources: Sequence[Tensor]) -> float:
        started = max(time.perf_counter(), self._free_at[lane])
        for destination, source in zip(to, sources, strict=True):
            destination.copy_(source)
        self._free_at[lane] = started + sum(source.nbytes for source in sources) / self._rate
        return self._free_at[lane]

    def download(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None) -> float:
        return self._copy("down", to, sources)

    def upload(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None) -> float:
        return self._copy("up", to, sources)

    def wait(self, ticket: float) -> None:
        time.sleep(max(0.0, ticket - time.perf_counter()))

    def join(self) -> None:
        """The accelerator waits for uploads, not the host."""


class _Layer(torch.autograd.Function):
    """Takes its share of the time of backward, then has a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, model: Model, index: int) -> Tensor:
        ctx.model, ctx.index = model, index
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.model.work()
        return (
            grad,
            ctx.model.grads[ctx.index].view(ctx.model.weights[ctx.index].shape),
            None,
            None,
        )


class Model(nn.Module):
    """Layers that compute nothing and take time."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        size = setting.params // setting.tensors
        self.weights = nn.ParameterList(
            _random(size, generator).bfloat16() for _ in range(setting.tensors)
        )
        self.grads = [
            _random(size, generator).mul_(1e-3).bfloat16() for _ in range(setting.tensors)
        ]
        self.seconds = 0.0
        self.is_busy = setting.backward == "busy"

    def work(self) -> None:
        """One layer's share of backward."""
        until = time.perf_counter() + self.seconds / len(self.weights)
        if not self.is_busy:
            time.sleep(max(0.0, until - time.perf_counter()))
            return
        # too small for a second thread, and in cache: it keeps one core busy
        small = torch.ones(64, 64, dtype=torch.float32, device="cpu")
        while time.perf_counter() < until:
            small = (small @ small).clamp_(0.0, 1.0)

    def forward(self) -> Tensor:
        hidden = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
        for index, weight in enumerate(self.weights):
            hidden = _Layer.apply(hidden, weight, self, index)  # type: ignore[no-untyped-call]
        return hidden.sum()


def _random(size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")


def build(setting: Setting, mode: str) -> tuple[Model, MegatronOptimizer]:
    """A model and its optimizer in one ``offload_mode``."""
    model = Model(setting)
    config = OptimizerConfig(
        lr=1e-3,
        bf16=True,
        clip_grad=_CLIP[setting.clip],
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=1.0,
        overlap_cpu_optimizer_d2h_h2d=True,
        offload_mode=mode,
    )
    optimizer = get_megatron_optimizer(config, model)
    if setting.bus:
        hybrid_of(optimizer).stepper.use_transfer(Bus(setting.bus))
    return model, optimizer


def hybrid_of(optimizer: MegatronOptimizer) -> HybridDeviceOptimizer:
    """The optimizer with a part on the host, of a stack that has only one."""
    (part,) = optimizer.chained_optimizers
    assert isinstance(part, WrappedOptimizer)
    assert isinstance(part.optimizer, HybridDeviceOptimizer)
    return part.optimizer
