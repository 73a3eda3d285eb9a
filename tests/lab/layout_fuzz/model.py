"""The model of a case and its gradients: functions of the case alone.

The loss is linear, and gradients are small multiples of a power of two, so sums over ranks,
micro-batches and squares are exact in any order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lab.layout_fuzz.case import Case, Layer, Param

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def dtype_of(case: Case, layer: Layer) -> torch.dtype:
    return torch.float32 if layer.fp32 else DTYPES[case.precision.split("-")[0]]


def initial(case: Case, layer: Layer, param: Param) -> Tensor:
    generator = torch.Generator().manual_seed(
        zlib.crc32(f"{case.seed} {layer.name}.{param.name}".encode())
    )
    return (torch.randn(param.shape, generator=generator) * 0.3).to(dtype_of(case, layer))


def gradient(
    case: Case, layer: Layer, param: Param, step: int, part: int, streams: Iterable[int]
) -> Tensor:
    total = torch.zeros(param.shape)
    for stream in streams:
        if not layer.used(step, stream):
            continue
        name = f"{case.seed} {layer.name}.{param.name} {step} {part} {stream}"
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = (
            torch.randn(param.shape, generator=generator) * 0.3
            if case.rough
            else torch.randint(-4, 5, param.shape, generator=generator) / 8
        )
        total += values * 2.0 ** case.scales[step % len(case.scales)]
        bad = case.bad
        if (
            bad
            and (bad.step, bad.stream, bad.layer, part) == (step, stream, layer.name, 0)
            and total.numel()
        ):
            total.reshape(-1)[-1] = bad.value
    return total


def used(case: Case, layer: Layer, step: int, streams: Iterable[int]) -> bool:
    """Whether one of the streams uses a layer."""
    return any(layer.used(step, stream) for stream in streams)


def row_factors(rows: int) -> Tensor:
    return torch.ones(rows).index_fill_(0, torch.arange(0, rows, 2), 0.5)


class Part(nn.Module):
    """A layer: its forward is the part of the loss that its parameters make."""

    def forward(self, weights: dict[str, Tensor]) -> Tensor:
        loss = torch.zeros(())
        for name, weight in weights.items():
            param = self.get_parameter(name)
            if isinstance(param, DTensor):
                param = param.to_local()
            loss = loss + (param.float() * weight.float()).sum()
        return loss


class Network(nn.Module):
    """The layers, by name; ``values`` are the parameters as this rank holds them, without those it
    does not."""

    def __init__(self, case: Case, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.blocks, self.experts = nn.ModuleDict(), nn.ModuleDict()
        self.register_buffer("count", torch.tensor(float(case.seed % 97)))
        for layer in case.layers:
            part = Part()
            for param in layer.params:
                if (value := values.get(f"{layer.name}.{param.name}")) is not None:
                    part.register_parameter(
                        param.name, nn.Parameter(value, requires_grad=not param.frozen)
                    )
            if layer.tied_to:
                other = next(each for each in case.layers if each.name == layer.tied_to)
                part.register_parameter(
                    "tied", self.part(other).get_parameter(other.params[0].name)
                )
            if part._parameters or not values:
                kind, _, name = layer.name.partition(".")
                getattr(self, kind)[name] = part

    def part(self, layer: Layer) -> nn.Module:
        return self.get_submodule(layer.name)

    def has(self, layer: Layer) -> bool:
        kind, _, name = layer.name.partition(".")
        return name in getattr(self, kind)

    def forward(self, weights: dict[str, dict[str, Tensor]]) -> Tensor:
        loss = torch.zeros(())
        for name, each in weights.items():
            loss = loss + self.get_submodule(name)(each)
        return loss
