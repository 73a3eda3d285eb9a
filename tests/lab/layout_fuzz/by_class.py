"""Optimizer classes with ``overrides``, and the param groups that mean the same."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn

from lab.any_program.classes import CLASSES
from lab.layout_fuzz.case import Case, Layout

WORDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {},
    "bf16-remainder": {"main_params": "remainder16"},
    "bf16-bf16": {"state": "bf16", "main_params": "remainder16"},
}
"""Words of the classes for precisions."""
_GIVEN = {"lr": 2.0**-6, "weight_decay": 0.1}


def built(case: Case, layout: Layout, model: nn.Module, place: dict[str, Any]) -> Any:
    """Return an optimizer class over a model, with the case's overrides.

    Args:
        place: settings of the layout's place.
    """
    kind, given = CLASSES[case.rule]
    words: dict[str, Any] = {"max_grad_norm": case.clip or None, **WORDS[case.precision]}
    if layout.fraction:
        words |= {"offload": layout.fraction, "offload_mode": layout.mode, **place}
    overrides = {pattern: dict(settings) for pattern, settings in case.overrides}
    return kind(model.named_parameters(), overrides=overrides, **_GIVEN, **given, **words)


def groups_by_hand(case: Case, model: nn.Module) -> list[dict[str, Any]]:
    """Return param groups with the settings that the overrides of a case mean."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for name, param in model.named_parameters():
        settings: dict[str, Any] = dict(_GIVEN)
        for pattern, changed in case.overrides:
            if any(fnmatch.fnmatchcase(name, each) for each in pattern.split("|")):
                settings |= dict(changed)
        if param.requires_grad:
            found.setdefault(tuple(settings.items()), []).append((name, param))
    return [{"params": params, **dict(settings)} for settings, params in found.items()]
