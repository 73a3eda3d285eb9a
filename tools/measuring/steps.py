"""What settings cost in a step on the host: the whole bf16 step (norm, clip, rule, FP32 and bf16
parameters) of several stacks, in turn in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.timing import alternate, ratio
from measuring.kernels import require_kernels
from mp_optim import OptimizerConfig, get_megatron_optimizer

TENSOR = 2_000_000
"""Elements of each parameter."""


@dataclass(frozen=True)
class Form:
    """What a stack is built with.

    Attributes:
        size: bytes a parameter that a step moves.
        settings: fields of the config.
    """

    size: int
    settings: dict[str, Any] = field(default_factory=dict)


def stack(params: int, settings: dict[str, Any]) -> Any:
    """An optimizer over bf16 parameters with gradients."""
    torch.manual_seed(0)
    model = nn.ParameterList()
    for _ in range(max(1, params // TENSOR)):
        model.append(nn.Parameter(torch.randn(TENSOR).bfloat16()))
        model[-1].grad = torch.randn(TENSOR).bfloat16()
    config = OptimizerConfig(lr=1e-3, bf16=True, clip_grad=1.0, **settings)
    return get_megatron_optimizer(config, model)


def compare_steps(heading: str, forms: dict[str, Form], params: int, rounds: int) -> None:
    """Print milliseconds of a step of each form, and ratios to the first one's.

    Args:
        heading: what the names of the forms are.
        forms: by name.
        params: parameters of each model.
        rounds: steps of each, after one that is not counted.
    """
    require_kernels()
    steps = {name: stack(params, form.settings).step for name, form in forms.items()}
    timings = alternate(steps, rounds, heading)
    first = next(iter(forms))
    table = Table(heading, "ms", "ratio", "ratio of the bytes")
    for name, form in forms.items():
        times = f"{ratio(timings[name], timings[first]):.2f}"
        sizes = f"{form.size / forms[first].size:.2f}"
        table.add_row(name, f"{1e3 * timings[name].median:.1f}", times, sizes)
    Console().print(table)
