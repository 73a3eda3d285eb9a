"""Who is checked: a class, or a function that makes optimizers, by its dotted name."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mp_optim.conform.kit import CHECKS, Check, Make

RULES = ("adam", "adamw", "sgd", "lion")
"""Rules whose formulas checks know."""


@dataclass(frozen=True)
class Subject:
    """An optimizer to check.

    Attributes:
        path: ``package.module.name`` of a class, or of any function ``name(params, **settings)``.
        settings: keyword arguments for it. Checks set lr, betas, eps, weight_decay and momentum
            where a formula needs them.
        rule: one of :data:`RULES`, whose formulas it promises to follow; None for another one. By
            default the name in lower case, if it is one of them.
    """

    path: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    rule: str | None = ""

    @property
    def known_rule(self) -> str | None:
        name = self.path.rpartition(".")[2].lower() if self.rule == "" else self.rule
        return name if name in RULES else None

    def checks(self, names: Iterable[str] = ()) -> list[Check]:
        """The checks that say something of its rule; of these names only, if any are given.

        Raises:
            ValueError: there is no check of such a name.
        """
        wanted = list(names) or list(CHECKS)
        unknown = [name for name in wanted if name not in CHECKS]
        if unknown:
            raise ValueError(f"no check is called {unknown[0]!r}; --list shows all names")
        checks = [check for name, check in CHECKS.items() if name in wanted]
        return [check for check in checks if not check.rules or self.known_rule in check.rules]

    def maker(self) -> Make:
        """What checks call.

        Raises:
            ValueError: there is nothing of that name, or it is no class or function.
        """
        factory = located(self.path)

        def make(params: Any, **settings: Any) -> torch.optim.Optimizer:
            optimizer: Any = factory(params, **{**self.settings, **settings})
            if has_modes(optimizer):
                optimizer.train()
            return optimizer  # type: ignore[no-any-return]

        return make


def has_modes(optimizer: Any) -> bool:
    """It averages weights, and steps in the mode of training alone (Schedule-Free)."""
    return callable(getattr(optimizer, "train", None)) and callable(
        getattr(optimizer, "eval", None)
    )


def located(path: str) -> Callable[..., Any]:
    """The object of a dotted name.

    Raises:
        ValueError: there is none, or it cannot be called.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{path!r} is no dotted name, as torch.optim.AdamW is one")
    found = getattr(importlib.import_module(module_name), name, None)
    if not callable(found):
        raise ValueError(f"{module_name} has no class or function {name!r}")
    return found  # type: ignore[no-any-return]


def parsed(argument: str) -> tuple[str, Any]:
    """``name=value`` of a command line: a literal of Python, a dtype as torch.bfloat16, or text.

    Raises:
        ValueError: there is no equals sign.
    """
    name, sign, text = argument.partition("=")
    if not sign:
        raise ValueError(f"--args {argument!r}: arguments are written name=value")
    if text.startswith("torch."):
        return name, getattr(torch, text.removeprefix("torch."))
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text
