"""The groups, settings and loss scale that a new optimizer must have."""

from __future__ import annotations

from typing import Any

from lab.any_program.foreigner import DEFAULTS
from lab.any_program.oracle import Group, Oracle, Scaler, Slot
from lab.any_program.setups import Settings, Setup
from lab.any_program.subject import name_of


def predicted(setup: Setup, slots: dict[str, Slot]) -> Oracle:
    groups = _groups(setup)
    grouped = {name for group in groups for name in group.names}
    scaler = None
    if setup.precision == "fp16":
        scaler = Scaler(setup.scale, setup.window, setup.hysteresis, setup.constant)
    oracle = Oracle(
        setup.rule,
        {name: slot for name, slot in slots.items() if name in grouped},
        groups,
        scaler,
        setup.clip,
        setup.threshold,
        setup.count_zeros,
        ema=setup.ema,
    )
    oracle.outside = {name: slot.model for name, slot in slots.items() if name not in grouped}
    oracle.deal_out()
    oracle.keep_as(setup.place)
    return oracle


def _groups(setup: Setup) -> list[Group]:
    found: dict[tuple[bool, int], Group] = {}
    of = {name_of(index, param): param for index, param in enumerate(setup.params)}
    for name in sorted(of, key=lambda name: of[name].expert):
        param = of[name]
        if setup.groups:
            given = setup.groups[param.group]
            group = Group([], param.expert, settings_of(setup, given, explicit=True))
            key = (param.expert, param.group)
        else:
            if param.frozen:
                continue
            decay = 0.0 if len(param.shape) <= 1 else 0.1
            group = Group(
                [], param.expert, settings_of(setup, Settings(0.01, decay), explicit=False)
            )
            key = (param.expert, int(decay == 0.0))
        found.setdefault(key, group).names.append(name)
    return list(found.values())


def settings_of(setup: Setup, given: Settings, explicit: bool) -> dict[str, Any]:
    rule, variant = setup.rule, setup.variant
    if rule == "foreign":
        return {**DEFAULTS, "lr": given.lr, "weight_decay": given.weight_decay}
    common = {"lr": given.lr, "weight_decay": given.weight_decay}
    if rule in ("adam", "lamb"):
        betas, eps = (given.betas, given.eps) if explicit else ((0.9, 0.999), 1e-8)
        more: dict[str, Any] = {
            "betas": betas,
            "eps": eps,
            "bias_correction": True,
            "adam_w_mode": not (rule == "adam" and variant),
        }
        if rule == "lamb":
            more |= {"grad_averaging": not variant, "use_nvlamb": variant}
    elif rule == "lion":
        more = {"betas": (0.5 if variant else 0.95, 0.98)}
    else:
        more = {"momentum": 0.0 if variant else 0.9, "dampening": 0.0, "nesterov": False}
    return {**common, **more, **setup.switches}
