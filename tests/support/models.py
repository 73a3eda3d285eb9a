"""Small models, a training helper, and a transfer that gives wrong results if a wait is missing."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim import OptimizerConfig, get_megatron_optimizer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class TinyMoE(nn.Module):
    """Embedding, dense layer, two experts as 3-D weights with a soft router, and an FP32 norm
    scale."""

    def __init__(self, dtype: torch.dtype, experts: bool = True, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(*shape, generator=generator) * 0.2).to(dtype))

        self.embed = weight(11, 8)
        self.dense = weight(8, 8)
        self.bias = weight(8)
        self.scale = nn.Parameter(torch.ones(1))
        self.experts = (
            nn.ParameterDict({"up": weight(2, 8, 16), "down": weight(2, 16, 8)})
            if experts
            else None
        )
        self.router = weight(8, 2) if experts else None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed[tokens]
        hidden = torch.tanh(hidden @ self.dense + self.bias)
        if self.experts is not None and self.router is not None:
            gates = (hidden.float() @ self.router.float()).softmax(-1)
            outputs = [
                torch.tanh(hidden @ self.experts["up"][e]) @ self.experts["down"][e]
                for e in range(2)
            ]
            hidden = sum(gates[..., e : e + 1].to(hidden.dtype) * outputs[e] for e in range(2))
        logits = (hidden @ self.embed.t()).float() * self.scale
        return nn.functional.cross_entropy(logits[:-1], tokens[1:])


COMPACT: dict[str, dict[str, Any]] = {
    "bf16": {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
    "fp16": {"exp_avg_dtype": "float16", "exp_avg_sq_dtype": "float16"},
    "8bit": {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    "8bit8": {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8", "param_remainder_bits": 8},
    "stochastic": {
        "exp_avg_dtype": "bfloat16",
        "exp_avg_sq_dtype": "uint8",
        "param_remainder_bits": 8,
        "stochastic_rounding": True,
    },
    "4bit": {"exp_avg_dtype": "uint4", "exp_avg_sq_dtype": "uint8"},
    "below": {"exp_avg_dtype": "uint4", "exp_avg_sq_dtype": "uint8", "fp32_state_below": 100},
    "remainder": {},
    "master": {"store_param_remainders": False, "exp_avg_dtype": "bfloat16"},
}
"""Storage formats by name: the precision "bf16-8bit" is a bf16 model with the format "8bit"."""


def form_fields(form: str) -> dict[str, Any]:
    return {"use_precision_aware_optimizer": True, **COMPACT[form]} if form else {}


def is_expert(param: Tensor, name: str) -> bool:
    return name.startswith("experts.")


def config_for(precision: str, fraction: float = 0.0, **settings: Any) -> OptimizerConfig:
    precision, _, compact = precision.partition("-")
    flags: dict[str, Any] = {precision: True} if precision != "fp32" else {}
    flags |= form_fields(compact)
    if precision == "fp16":
        flags["initial_loss_scale"] = 2.0**12
    if fraction > 0:
        flags |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    return OptimizerConfig(
        **{"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, **flags, **settings}
    )


def build(
    precision: str, fraction: float = 0.0, experts: bool = True, seed: int = 0, **settings: Any
):
    model = TinyMoE(DTYPES[precision.split("-")[0]], experts, seed)
    optimizer = get_megatron_optimizer(
        config_for(precision, fraction, **settings), model, expert_predicate=is_expert
    )
    return model, optimizer


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 11, (24,), generator=torch.Generator().manual_seed(1000 + step))


def train(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = model(tokens_of(step))
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8),
            b.contiguous().reshape(-1).view(torch.uint8),
        )
    )


class AdversarialTransfer:
    is_same_place = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.pending: list[tuple[bool, list[tuple[Tensor, Tensor]]] | None] = []

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def _start(self, is_upload: bool, to: Sequence[Tensor], sources: Sequence[Tensor]) -> int:
        for destination in to:
            destination.fill_(float("nan") if destination.is_floating_point() else 1)
        self.pending.append((is_upload, list(zip(to, sources, strict=True))))
        return len(self.pending) - 1

    def notes(self) -> tuple[str, ...]:
        return ()

    def mark(self) -> None: ...

    def download(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: None = None) -> int:
        return self._start(False, to, sources)

    def upload(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: None = None) -> int:
        return self._start(True, to, sources)

    def wait(self, ticket: int) -> None:
        with self._lock:
            entry = self.pending[ticket]
            self.pending[ticket] = None
            for destination, source in entry[1] if entry else ():
                destination.copy_(source)

    def join(self) -> None:
        for ticket, entry in enumerate(self.pending):
            if entry is not None and entry[0]:
                self.wait(ticket)
