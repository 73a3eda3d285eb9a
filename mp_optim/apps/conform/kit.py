"""Helpers of checks: the checked optimizer, findings, comparisons and small models.

A check is a function with one argument, :data:`Make`. This module needs only torch.
"""

from __future__ import annotations

import ast
import importlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[..., torch.optim.Optimizer]
"""Function ``make(params, **settings)`` that returns an optimizer of the checked class.
``settings`` replace the user's settings of the same name."""

LEVELS = ("must", "should")
"""Levels of checks.

- must: torch promises the property, and a run without it is silently wrong or breaks.
- should: widely used programs rely on the property.
"""


class Nonconformance(Exception):
    """Failure of a check. The message is one sentence with the numbers."""


class Refused(Exception):
    """The optimizer refuses a request with its own error, which is not a failure."""


class NotApplicable(Exception):
    """The check does not apply to this optimizer; the message is the reason."""


@dataclass(frozen=True)
class Check:
    """A conformance check of an optimizer.

    Attributes:
        function: the check; raises :class:`Nonconformance`.
        level: one of :data:`LEVELS`.
        rules: rules whose formula the check knows; empty if the check applies to all rules.
    """

    function: Callable[[Make], None]
    level: str
    rules: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def statement(self) -> str:
        """The promise that the check tests, as one sentence."""
        return " ".join((self.function.__doc__ or "").partition("\n\n")[0].split())


CHECKS: dict[str, Check] = {}
"""Every check by its name, in the order in which they run."""

Function = Callable[[Make], None]


def must(*rules: str, level: str = "must") -> Callable[[Function], Function]:
    """Return a decorator that registers a check of level ``level``. The check applies only to
    optimizers of ``rules``, or to all optimizers if ``rules`` is empty."""

    def registered(function: Function) -> Function:
        CHECKS[function.__name__] = Check(function, level, rules)
        return function

    return registered


should = partial(must, level="should")
"""Decorator like :func:`must` that registers a check of level should."""


# -- words of checks -------------------------------------------------------------------------------


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of a normal distribution. Calls with one shape and seed return equal
    numbers."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(dtype)


def filled(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device="cpu")


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model of two matrices, without biases, because some rules step matrices only."""
    model = nn.Sequential(nn.Linear(64, 72, bias=False), nn.Tanh(), nn.Linear(72, 8, bias=False))
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.copy_(noise(*param.shape, seed=seed) / 8)
    return model.to(dtype)


def backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    """Add the gradients of one batch to the model's gradients. The number of the step seeds the
    batch."""
    dtype = next(model.parameters()).dtype
    x, y = noise(16, 64, seed=2 * step, dtype=dtype), noise(16, 8, seed=2 * step + 1)
    loss = (model(x).float() - y).square().mean() * scale
    loss.backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Take some steps, each with its own batch and seed."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        torch.manual_seed(step)
        optimizer.step()


def trained(
    make: Make, steps: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a model and its optimizer after some steps."""
    model = layers(dtype)
    optimizer = make(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the learning rate of every param group by ``factor``. An optimizer may have split
    one given group into several groups."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def through_file(content: dict[str, Any], safely: bool = False) -> dict[str, Any]:
    """Save content to a file, and return the loaded content."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=safely)
    return loaded


def saved(optimizer: torch.optim.Optimizer, safely: bool = False) -> dict[str, Any]:
    """Return the optimizer's state dict after a save to a file and a load from the file."""
    return through_file(optimizer.state_dict(), safely)


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor in nested dicts and lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for key in value for each in tensors_in(value[key])]
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in tensors_in(item)]
    return []


def values_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in FP64. The tensor may be quantized."""
    plain = torch.empty(tensor.shape, dtype=torch.float64, device="cpu")
    return plain.copy_(tensor.detach())


def require(condition: object, finding: str) -> None:
    if not condition:
        raise Nonconformance(finding)


def require_same(found: Iterable[Tensor], expected: Iterable[Tensor], what: str) -> None:
    """Raise Nonconformance unless the tensors of two lists are equal bit for bit. Signs of zeros
    may differ; NaNs are equal."""
    for index, pair in enumerate(zip(found, expected, strict=True)):
        dtype, other = (tensor.dtype for tensor in pair)
        require(dtype == other, f"{what}: {dtype} instead of {other}")
        here, there = map(values_of, pair)
        differing = (here != there) & ~(here.isnan() & there.isnan())
        if differing.any():
            largest = float((here - there).abs().max())
            count = f"{int(differing.sum())} of {differing.numel()} elements"
            raise Nonconformance(
                f"{what}: {count} of tensor {index} differ, by up to {largest:.3g}"
            )


def require_close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Raise Nonconformance if an element differs by more than the tolerance, or is NaN."""
    found, expected = found.detach().double(), expected.detach().double()
    off = (found - expected).abs()
    if not bool((off <= tolerance).all()):
        worst = int(off.nan_to_num(float("inf"), float("inf")).argmax())
        here, there = found.flatten()[worst].item(), expected.flatten()[worst].item()
        raise Nonconformance(f"{what}: {here:.9g} instead of {there:.9g}")


def percent(share: float) -> str:
    """Return a fraction as text in whole percent. A fraction that rounds to 0 has no minus sign."""
    text = f"{100 * share:.0f}"
    return "0 %" if text == "-0" else f"{text} %"


def plain(make: Make) -> Make:
    """Return ``make`` without the user's settings that would change the checked formula."""
    group = make([nn.Parameter(noise(4, 6))]).param_groups[0]
    off = {name: 0 for name in ("nesterov", "dampening", "amsgrad", "maximize") if group.get(name)}
    return lambda params, **settings: make(params, **{**off, **settings})


def make_or_refuse(make: Make, params: Any, **settings: Any) -> torch.optim.Optimizer:
    """Return an optimizer. An error of its constructor is a refusal.

    Raises:
        Refused: the constructor raised; the message has the text of its error.
    """
    try:
        return make(params, **settings)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def step_or_refuse(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
    """Take a step. An error is a refusal if no parameter was changed.

    Raises:
        Refused: the step raised; the message has the text of its error.
    """
    before = [param.detach().clone() for param in params]
    try:
        optimizer.step()
    except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
        require_same(params, before, "parameters after a refused step")
        raise Refused(f"{type(error).__name__}: {error}") from error


RULES = ("adam", "adamw", "sgd", "lion")
"""Rules whose formulas the checks know."""


@dataclass(frozen=True)
class Subject:
    """An optimizer to check.

    Attributes:
        path: ``package.module.name`` of a class, or of any function ``name(params, **settings)``.
        settings: keyword arguments of the class. Checks set lr, betas, eps, weight_decay and
            momentum if a formula needs them.
        rule: one of :data:`RULES`, whose formula the optimizer follows; None for another rule. An
            empty rule stands for the class's name in lower case, if that is a rule.
    """

    path: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    rule: str | None = ""

    @property
    def known_rule(self) -> str | None:
        name = self.path.rpartition(".")[2].lower() if self.rule == "" else self.rule
        return name if name in RULES else None

    def checks(self, names: Iterable[str] = ()) -> list[Check]:
        """Return the checks that apply to the optimizer's rule.

        Args:
            names: names of checks; all checks if empty.

        Raises:
            ValueError: a name is not the name of a check.
        """
        wanted = list(names) or list(CHECKS)
        unknown = [name for name in wanted if name not in CHECKS]
        if unknown:
            raise ValueError(
                f"no check is called {unknown[0]!r}; pass one of the names that --list prints"
            )
        checks = [check for name, check in CHECKS.items() if name in wanted]
        return [check for check in checks if not check.rules or self.known_rule in check.rules]

    def maker(self) -> Make:
        """Return the ``make`` of this optimizer, for the checks.

        Raises:
            ValueError: the name does not exist, or is not a class or function.
        """
        module, _, name = self.path.rpartition(".")
        if not module:
            raise ValueError(
                f"{self.path!r} is no dotted name; write one such as torch.optim.AdamW"
            )
        factory = getattr(importlib.import_module(module), name, None)
        if not callable(factory):
            raise ValueError(f"{module} has no class or function {name!r}; correct the name")

        def make(params: Any, **settings: Any) -> torch.optim.Optimizer:
            optimizer: Any = factory(params, **{**self.settings, **settings})
            # Call train(), because optimizers that average weights (Schedule-Free) step only
            # in this mode.
            if callable(getattr(optimizer, "train", None)) and hasattr(optimizer, "eval"):
                optimizer.train()
            return optimizer  # type: ignore[no-any-return]

        return make


def parsed(argument: str) -> tuple[str, Any]:
    """Return the name and the value in a text of the form ``name=value``.

    The value is a Python literal, a dtype such as torch.bfloat16, or text.

    Raises:
        ValueError: the equals sign is missing.
    """
    name, sign, text = argument.partition("=")
    if not sign:
        raise ValueError(f"--args {argument!r}: the equals sign is missing; write name=value")
    if text.startswith("torch."):
        return name, getattr(torch, text.removeprefix("torch."))
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text
