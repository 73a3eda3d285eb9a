"""Opponents of the whole mixed-precision step: Megatron-core's own optimizer, and the sequence of
operations that a training loop writes around a fused Adam."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import megatron
from benchmarks.opponents import BETAS, CLIP, DECAY, EPS, LR, Step

SEQUENCE = "unfused sequence"
"""First words of the rows of :class:`UnfusedSequence`."""
ADAMS = ("torch fused AdamW", "apex FusedAdam", "Transformer Engine FusedAdam")
CHUNK = 2048 * 32
"""Elements of a block of apex's kernels, as in Megatron."""


class Opponent(NamedTuple):
    """A contender of the whole step.

    Attributes:
        name: the row's label, made of its operations or of its library.
        wide: True if it reads FP32 gradients.
        build: takes bf16 params and returns the step.
    """

    name: str
    wide: bool
    build: Callable[[Sequence[Tensor]], Step]


def opponents() -> Iterator[Opponent]:
    """Yield the sequence with each Adam; building one raises ImportError without its library."""
    for adam in ADAMS:
        name = f"{SEQUENCE}: upcast, norm, clip, {adam}, downcast"
        yield Opponent(name, False, lambda params, a=adam: UnfusedSequence(params, a).step)


def megatron_core(wide: bool) -> Opponent:
    """Return Megatron-core's own optimizer, with the Adam that it finds.

    Args:
        wide: True for FP32 ``main_grad``, False for bf16.
    """
    dtype = torch.float32 if wide else torch.bfloat16
    return Opponent(
        f"Megatron-core with {megatron.adam()}, {'FP32' if wide else 'bf16'} main_grad",
        wide,
        lambda params: megatron.megatron_step(
            params, [torch.full_like(param, 1e-3, dtype=dtype) for param in params], fused=True
        ),
    )


def _adam(name: str, params: list[Tensor]) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    if name.startswith("torch"):
        return torch.optim.AdamW(params, fused=True, **settings)
    module = (
        "apex.optimizers" if name.startswith("apex") else "transformer_engine.pytorch.optimizers"
    )
    optimizer: torch.optim.Optimizer = importlib.import_module(module).FusedAdam(
        params, adam_w_mode=True, **settings
    )
    return optimizer


class UnfusedSequence:
    """FP32 main params, moments and gradients of bf16 params, kept between steps.

    With apex the norm, the clipping and the downcast are apex's kernels, too.
    """

    def __init__(self, params: Sequence[Tensor], adam: str) -> None:
        self.params = list(params)
        self.grads = [torch.full_like(param, 1e-3) for param in params]
        self.mains = [torch.nn.Parameter(param.float()) for param in params]
        for main in self.mains:
            main.grad = torch.zeros_like(main)
        self.adam = _adam(adam, self.mains)
        self.kernels = importlib.import_module("amp_C") if adam.startswith("apex") else None
        self.flag = torch.zeros(1, dtype=torch.int32, device=params[0].device)

    @torch.no_grad()
    def step(self) -> None:
        main_grads = [main.grad for main in self.mains]
        torch._foreach_copy_(main_grads, self.grads)
        if self.kernels is None:
            torch.nn.utils.clip_grad_norm_(self.mains, CLIP, foreach=True)
            self.adam.step()
            torch._foreach_copy_(self.params, self.mains)
            return
        norm, _ = self.kernels.multi_tensor_l2norm(CHUNK, self.flag, [main_grads], False)
        coefficient = CLIP / (norm.item() + 1e-6)
        if coefficient < 1.0:
            lists = [main_grads, main_grads]
            self.kernels.multi_tensor_scale(CHUNK, self.flag, lists, coefficient)
        self.adam.step()
        lists = [[main.detach() for main in self.mains], self.params]
        self.kernels.multi_tensor_scale(CHUNK, self.flag, lists, 1.0)
