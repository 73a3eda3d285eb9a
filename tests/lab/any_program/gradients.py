"""Gradients of every kind: of a loss, made by hand, changed between backward and step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from lab.any_program.arithmetic import F
from lab.any_program.subject import Subject

SIZES = ("normal", "normal", "large", "tiny", "huge")
FACTORS = {"normal": 1.0, "large": 100.0, "tiny": 1e-20, "huge": 1e30}
"""Of a loss; with huge ones 16-bit gradients overflow."""

KINDS = (
    "normal",
    "none",
    "zero",
    "tiny",
    "denormal",
    "huge",
    "inf",
    "nan",
    "strided",
    "expanded",
    "main",
    "main in 64 bits",
    "decoupled",
)


def loss(subject: Subject, seed: int, unused: set[int], size: str) -> Tensor | None:
    terms = []
    for index, (name, param) in enumerate(subject.params()):
        if index not in unused and param.requires_grad:
            wanted = torch.from_numpy(_normal(seed + index, tuple(param.shape)))
            wide = param.float().nan_to_num(0.5)  # an element that is lost stays so
            terms.append(
                ((wide - wanted) * (wide - wanted)).sum() * (0.1 if "experts" in name else 0.5)
            )
    return sum(terms[1:], terms[0]) * FACTORS[size] if terms else None


def _normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.random.RandomState(seed).standard_normal(shape).astype(F))


def put(param: nn.Parameter, kind: str, seed: int) -> None:
    """Give a parameter a gradient by hand."""
    values = torch.from_numpy(_normal(seed, tuple(param.shape)))
    if kind in ("inf", "nan") and values.numel():
        values.view(-1)[seed % values.numel()] = float(kind)
    values = values * {
        "zero": 0.0,
        "tiny": 1e-30,
        "denormal": 1e-39,
        "huge": 3e4 if param.dtype == torch.float16 else 1e18,
    }.get(kind, 1.0)
    if kind == "main":
        param.main_grad = values  # type: ignore[attr-defined]
    elif kind == "main in 64 bits":
        param.main_grad = values.double() * (1 + 2.0**-40)  # type: ignore[attr-defined]
    elif kind == "decoupled":
        param.decoupled_grad = values.bfloat16()  # type: ignore[attr-defined]
    else:
        param.grad = None if kind == "none" else laid_out(values.to(param.dtype), kind)


def laid_out(values: Tensor, kind: str) -> Tensor:
    if kind == "strided":
        wide = torch.zeros((*values.shape, 2), dtype=values.dtype)
        wide[..., 0] = values
        return wide[..., 0]
    if kind == "expanded" and values.numel():
        return values.reshape(-1)[0].expand(values.shape)
    return values


def own_memory(subject: Subject) -> None:
    for _, param in subject.params():
        if param.grad is not None and 0 in param.grad.stride():
            param.grad = param.grad.clone(memory_format=torch.contiguous_format)


CHANGES = ("times", "other", "none", "foreach", "amp", "rebound", "untraced", "numpy")
UNTRACED = ("untraced", "numpy")
"""What nothing can notice: the caller has to say it."""
_INTEGERS = {2: torch.int16, 4: torch.int32}


def change(param: nn.Parameter, how: str) -> None:
    """Change a gradient that is there."""
    assert param.grad is not None
    if how == "times":
        param.grad.mul_(-2.0)
    elif how == "other":
        param.grad = param.grad.detach().clone() + 1
    elif how == "none":
        param.grad = None
    elif how == "foreach":
        torch._foreach_mul_([param.grad], -2.0)
    elif how == "amp":
        found, half = torch.zeros(1), torch.tensor(0.5)
        torch._amp_foreach_non_finite_check_and_unscale_([param.grad], found, half)
    elif how == "rebound":
        param.grad.data = param.grad.data * 2
    elif how == "numpy":
        bits = param.grad.view(_INTEGERS[param.grad.element_size()]).numpy()
        bits ^= np.iinfo(bits.dtype).min  # the sign
    else:
        param.grad.data.mul_(0.5)
