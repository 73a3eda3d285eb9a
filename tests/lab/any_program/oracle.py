"""The state that the promises predict after each operation, to the bit.

- A step updates every parameter that has a gradient, frozen or not.
- A skipped step changes the loss scale only.
- Outside writes are followed before the next step, save or load. A main param that still rounds to
  the model's value is kept, any other is replaced. A remainder that does not fit is cleared.
- A load copies its input. Model and main params agree after it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.any_program.arithmetic import (
    MOMENTS,
    Array,
    F,
    State,
    Stored,
    equal_bits,
    fp32,
    in_pairs,
    join,
    rounded,
    rounded_by_chance,
    same_bits,
    split,
    stepped,
    stored,
    sum_of_squares,
)
from lab.any_program.setups import FORMS, LOWEST_RATE, REMAINDERS, Place

LARGEST_SCALE = 2.0**126


@dataclass
class Slot:
    """A parameter and its state.

    Attributes:
        model: values of the model's parameter.
        main: the main param, if it is another tensor.
        low: the remainder.
        lone: True for 16 bits without main param or remainder.
        bound: True if it has state: it was trainable at the start, or was stepped.
        touched: True if the model's tensor was written or replaced since the last look.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    model: Array
    main: Array | None = None
    low: Array | None = None
    low_bits: int | str = 16
    lone: bool = False
    moments: State = field(default_factory=dict)
    step: int = 0
    bound: bool = True
    touched: bool = False
    average: Array | None = None

    def value(self) -> Array:
        if self.low is not None:
            return join(self.model, self.low, self.low_bits)
        return self.model if self.main is None else self.main

    def set_value(self, value: Array, by_chance: bool = False) -> None:
        if self.low is not None:
            self.model, self.low = split(value, self.low_bits)
        elif self.lone and by_chance:
            self.model = rounded_by_chance(value, self.name, self.step)
        elif self.lone:
            self.model = rounded(value, self.dtype)
        elif self.main is None:
            self.model = value
        else:
            self.main, self.model = value, rounded(value, self.dtype)

    def set_average(self, decay: float) -> None:
        now = self.value()
        if self.step == 1 or self.average is None:
            self.average = now.copy()
        else:
            with np.errstate(all="ignore"):
                self.average = self.average + (now - self.average) * F(1 - decay)

    def follow(self) -> None:
        if self.touched and self.bound and self.main is not None:
            then, now = rounded(self.main, self.dtype), self.model
            self.main = np.where(equal_bits(then, now), self.main, now)
        self.touched = False

    def reload(self) -> None:
        self.follow()


@dataclass
class Group:
    names: list[str]
    expert: bool
    settings: dict[str, Any]
    tensor: bool = False
    part: int = 0


@dataclass
class Scaler:
    """The loss scale of fp16."""

    scale: float
    window: int
    hysteresis: int
    constant: bool
    clean: int = 0
    left: int = 0

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def update(self, overflow: bool) -> None:
        if self.constant:
            return
        self.left = max(self.left - 1, 0) if overflow else self.hysteresis
        self.clean = 0 if overflow else self.clean + 1
        factor = 0.5 if overflow and self.left == 0 else 2.0 if self.clean >= self.window else 1.0
        self.clean = 0 if self.clean >= self.window else self.clean
        self.scale = min(max(self.scale * factor, 1.0), LARGEST_SCALE)


@dataclass
class Outcome:
    success: bool
    norm: float | None
    zeros: int | None


@dataclass
class Oracle:
    """The whole of it. Groups are in the order of the optimizer's; ``outside`` are parameters it
    was not given."""

    rule: str
    slots: dict[str, Slot]
    groups: list[Group]
    scaler: Scaler | None
    clip: float
    threshold: float
    count_zeros: bool
    outside: dict[str, Array] = field(default_factory=dict)
    ema: float | None = None

    # -- how state is kept ----------------------------------------------------------------------

    def keep_as(self, place: Place) -> None:
        """Give every slot state in a place's form: fresh for new slots, converted from another
        form."""
        for slot in self.slots.values():
            self.keep_slot_as(slot, place)

    def keep_slot_as(self, slot: Slot, place: Place) -> None:
        if not slot.bound:
            return
        value, half = slot.value(), slot.dtype != "fp32"
        remains = half and place.form in REMAINDERS
        bits = FORMS[place.form].get("param_remainder_bits", 16)
        slot.lone = remains and bits == 0
        if slot.lone:
            slot.low, slot.main, slot.model = None, None, rounded(value, slot.dtype)
        elif remains and (slot.low is None or slot.low_bits != bits):
            slot.main, slot.low_bits = None, bits
            slot.model, slot.low = split(value, bits)
        elif half and not remains and slot.main is None:
            slot.low, slot.main, slot.model = (None, value.copy(), rounded(value, slot.dtype))
        for name in self.moment_names(slot):
            slot.moments[name] = in_form(slot.moments.get(name), name, place, slot.model.size)

    def moment_names(self, slot: Slot) -> tuple[str, ...]:
        settings = self.group_of(slot.name).settings
        if not settings.get("momentum", 1.0):
            return ()
        if self.rule == "foreign" and not slot.step:
            return ()  # it makes its state when it steps
        return MOMENTS[self.rule]

    def converts_losslessly(self, place: Place) -> bool:
        """Whether all state can be kept in a place's form without losing a bit."""
        for slot in filter(lambda slot: slot.bound, self.slots.values()):
            trial = copy.deepcopy(slot)
            self.keep_slot_as(trial, place)
            pairs = [
                (trial.moments[name].values(), kept.values()) for name, kept in slot.moments.items()
            ]
            if not all(
                np.array_equal(a, b, equal_nan=True)
                for a, b in [*pairs, (trial.value(), slot.value())]
            ):
                return False
        return True

    # -- looking up -------------------------------------------------------------------------------

    def order(self) -> list[tuple[Group, Slot]]:
        return [(group, self.slots[name]) for group in self.groups for name in group.names]

    def group_of(self, name: str) -> Group:
        return next(group for group in self.groups if name in group.names)

    # -- operations -------------------------------------------------------------------------------

    def follow(self) -> None:
        for slot in self.slots.values():
            slot.follow()

    def reload(self) -> None:
        for slot in self.slots.values():
            slot.reload()

    def wrote(self, name: str, values: Array) -> None:
        self.slots[name].model, self.slots[name].touched = values.copy(), True

    def step(self, grads: Mapping[str, Array], place: Place) -> Outcome:
        self.follow()
        for name in grads:
            if not self.slots[name].bound:
                self.slots[name].bound = True
                self.keep_slot_as(self.slots[name], place)
        total = sum(
            in_pairs([sum_of_squares(grads[name]) for name in names if name in grads])
            for names in self._parts()
        )
        inverse = 1.0 / self.scaler.scale if self.scaler else 1.0
        overflow = not math.isfinite(total)
        norm = math.nan if overflow else math.sqrt(total) * inverse
        skip = overflow or norm > self.threshold
        if not skip:
            clip = min(1.0, self.clip / (norm + 1e-6)) if self.clip > 0 else 1.0
            self._apply(grads, fp32(inverse * clip))
        if self.scaler:
            self.scaler.update(overflow)
        zeros = sum(int(np.sum(g == 0)) for g in grads.values()) if self.count_zeros else None
        return Outcome(not skip, None if overflow else norm, None if overflow else zeros)

    def _parts(self) -> list[list[str]]:
        return [
            [name for group in self.groups if group.part == part for name in group.names]
            for part in (0, 1)
        ]

    def deal_out(self) -> None:
        self.groups.sort(key=lambda group: group.expert)
        mixed = not all(group.expert for group in self.groups)
        for group in self.groups:
            group.part = int(group.expert and mixed and self.rule != "foreign")

    def add_group(self, group: Group) -> None:
        parts = {other.part for other in self.groups}
        alike = [other.part for other in self.groups if other.expert == group.expert]
        group.part = max(alike or parts)
        self.groups.append(group)
        self.groups.sort(key=lambda group: group.part)

    def widen(self) -> None:
        for slot in self.slots.values():
            slot.moments = {
                name: Stored("float32", kept.values(), None, kept.second)
                for name, kept in slot.moments.items()
            }

    def _apply(self, grads: Mapping[str, Array], multiplier: float) -> None:
        for group, slot in self.order():
            if slot.name not in grads:
                continue
            slot.step += 1
            value, slot.moments = stepped(
                self.rule,
                slot.value(),
                grads[slot.name],
                slot.moments,
                slot.step,
                group.settings,
                multiplier,
            )
            slot.set_value(value, by_chance=True)
            if self.ema is not None:
                slot.set_average(self.ema)
        for group in self.groups:
            if "rate" in group.settings and not grads.keys().isdisjoint(group.names):
                rate = group.settings["rate"] * 0.5
                group.settings["rate"] = rate if rate > LOWEST_RATE else 1.0
                group.settings["count"] += 1

    def give_moment(self, slot: Slot, name: str, values: Array) -> None:
        """Give a moment FP32 values, rounded to its form."""
        slot.moments[name] = stored(values, slot.moments[name].form, name == "exp_avg_sq")

    def begin_again(self, slot: Slot) -> None:
        """Have the state of before the first step; the main param stays."""
        slot.step, slot.average = 0, None
        for name, now in slot.moments.items():
            self.give_moment(slot, name, np.zeros_like(now.values()))
        if self.rule == "foreign":
            slot.moments = {}

    def scale_rows(self, name: str, factors: Array) -> None:
        slot = self.slots[name]
        rows = slot.value().reshape(slot.shape[0], -1) if slot.model.size else None
        if rows is not None:
            slot.set_value((rows * factors.reshape(-1, 1)).reshape(-1))

    def averaged(self, slot: Slot) -> Array:
        if slot.average is None or not slot.step:
            return slot.model
        return rounded(slot.average, slot.dtype)


def in_form(now: Stored | None, name: str, place: Place, size: int) -> Stored:
    second = name == "exp_avg_sq"
    fields = FORMS[place.form]
    form = fields.get("exp_avg_sq_dtype" if second else "exp_avg_dtype", "float32")
    if form == "uint8" and size < fields.get("fp32_state_below", 0):
        form = "float32"
    if now is not None and now.form == form:
        return now
    return stored(np.zeros(size, F) if now is None else now.values(), form, second, loads=True)


def equal_settings(a: Any, b: Any) -> bool:
    """Whether settings are the same, lists and tuples alike."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal_settings, a, b))
    return bool(a == b)


__all__ = ["Group", "Oracle", "Outcome", "Scaler", "Slot", "equal_settings", "in_form", "same_bits"]
