"""Random setups of a program: plain data with a ``repr`` that is Python."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {
        "exp_avg_dtype": "bfloat16",
        "exp_avg_sq_dtype": "bfloat16",
        "store_param_remainders": False,
    },
    "mixed": {"exp_avg_dtype": "bfloat16", "store_param_remainders": False},
    "float16": {
        "exp_avg_dtype": "float16",
        "exp_avg_sq_dtype": "float16",
        "store_param_remainders": False,
    },
    "8bit": {
        "exp_avg_dtype": "uint8",
        "exp_avg_sq_dtype": "uint8",
        "store_param_remainders": False,
    },
    "remainders": {},
    "remainders and bfloat16": {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
    "remainders and 8bit": {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    "8bit remainders": {
        "exp_avg_dtype": "uint8",
        "exp_avg_sq_dtype": "float16",
        "param_remainder_bits": 8,
    },
    "no remainders": {"param_remainder_bits": 0, "stochastic_rounding": True},
    "no remainders and float16": {
        "exp_avg_dtype": "float16",
        "exp_avg_sq_dtype": "float16",
        "param_remainder_bits": 0,
        "stochastic_rounding": True,
    },
    "remainders and 8bit from 256 on": {
        "exp_avg_dtype": "uint8",
        "exp_avg_sq_dtype": "uint8",
        "fp32_state_below": 256,
    },
}
"""Forms of state by name, as fields of the config."""

REMAINDERS = tuple(form for form in FORMS if "remainders" in form)

SHAPES = (
    (),
    (0,),
    (1,),
    (3,),
    (2, 3),
    (16, 16),
    (255,),
    (257,),
    (2, 128),
    (1, 5, 2),
    (1, 1030),
    (17, 15),
)


@dataclass(frozen=True)
class Param:
    """A parameter of the model.

    Attributes:
        half: in the model's 16-bit dtype, if it has one; else FP32.
        transposed: not contiguous, if it is a matrix.
        group: which explicit group it is in, if the program makes its own.
    """

    shape: tuple[int, ...]
    half: bool = True
    expert: bool = False
    transposed: bool = False
    frozen: bool = False
    group: int = 0


@dataclass(frozen=True)
class Place:
    fraction: float = 0.0
    mode: str = "sync"
    backend: str = "reference"
    form: str = "plain"
    overlap: bool = False
    where: str = "host"
    """``offload_place``."""
    on_disk: bool = False


@dataclass(frozen=True)
class Settings:
    """Settings of one explicit group."""

    lr: float = 0.01
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8


@dataclass(frozen=True)
class Setup:
    """Model, config and groups of a program.

    Attributes:
        precision: bf16, fp16 or fp32.
        groups: settings of explicit groups; none for those of the standard overrides.
        scale: initial loss scale of fp16. constant: it stays.
    """

    params: tuple[Param, ...]
    precision: str = "bf16"
    rule: str = "adam"
    place: Place = Place()
    groups: tuple[Settings, ...] = ()
    clip: float = 1.0
    threshold: float = float("inf")
    seed: int = 0
    count_zeros: bool = False
    scale: float = 256.0
    constant: bool = False
    window: int = 2
    hysteresis: int = 1
    variant: bool = False
    """L2 decay for Adam, NVLAMB without averaging, SGD without momentum."""
    ema: float | None = None
    """Averages are kept, with this decay."""
    cautious_wd: bool = False
    """Cautious weight decay, where the rule has it."""
    audit: float = 0.0
    """Share of the elements that each step repeats, where the rule allows that. Nothing in a
    program is an alarm: it raises."""

    @property
    def switches(self) -> dict[str, bool]:
        if self.rule not in ("adam", "lion"):
            return {}
        is_decoupled = self.rule != "adam" or not self.variant
        return {"cautious_wd": is_decoupled and self.cautious_wd}

    def __post_init__(self) -> None:
        if self.rule == "foreign":  # plain state, no experts, no averages
            params = tuple(replace(param, expert=False) for param in self.params)
            object.__setattr__(self, "params", params)
            object.__setattr__(self, "place", replace(self.place, form="plain"))
            object.__setattr__(self, "ema", None)
        if self.rule in ("foreign", "lamb"):
            object.__setattr__(self, "audit", 0.0)


FRACTIONS = (0.0, 0.37, 1.0)
BACKENDS = tuple(os.environ.get("MP_OPTIM_BACKENDS", "reference native auto").split())
LOWEST_RATE = 0.1
"""Below it the foreign optimizer's rate begins again with 1."""


def fitting(place: Place) -> Place:
    if place.fraction == 0.0:
        return Place(0.0, "sync", place.backend, place.form)
    if place.where == "streamed" and not place.on_disk:
        return replace(place, mode="sync")
    return place


def places(precision: str) -> SearchStrategy[Place]:
    forms = [form for form in FORMS if precision == "bf16" or form not in REMAINDERS]

    compact = st.one_of(st.just("plain"), st.just("plain"), st.sampled_from(forms))
    return st.builds(
        Place,
        st.sampled_from(FRACTIONS),
        st.sampled_from(("sync", "overlap", "speculative")),
        st.sampled_from(BACKENDS),
        compact,
        st.booleans(),
        st.sampled_from(("host", "host", "streamed")),
        st.sampled_from((False, False, True)),
    ).map(fitting)


PARAMS = st.builds(
    Param,
    st.sampled_from(SHAPES),
    half=st.integers(0, 3).map(bool),
    expert=st.integers(0, 3).map(lambda n: n == 3),
    transposed=st.booleans(),
    frozen=st.integers(0, 9).map(lambda n: n == 9),
    group=st.integers(0, 2),
)

SETTINGS = st.builds(
    Settings,
    st.sampled_from((0.01, 0.0, 0.3)),
    st.sampled_from((0.1, 0.0)),
    st.sampled_from(((0.9, 0.99), (0.0, 0.5), (0.95, 0.999))),
    st.sampled_from((1e-8, 1e-3)),
)


def setups() -> SearchStrategy[Setup]:
    def rest(precision: str) -> SearchStrategy[Setup]:
        return st.builds(
            Setup,
            st.lists(PARAMS, min_size=1, max_size=5).map(tuple),
            st.just(precision),
            st.sampled_from(("adam", "adam", "lamb", "sgd", "lion", "foreign")),
            places(precision),
            st.one_of(st.just(()), st.lists(SETTINGS, min_size=3, max_size=3).map(tuple)),
            st.sampled_from((1.0, 0.0, 1e-3, 1e6)),
            st.sampled_from((float("inf"), float("inf"), 50.0)),
            st.integers(0, 99),
            st.booleans(),
            st.sampled_from((256.0, 1.0, 2.0**15)),
            st.booleans(),
            st.integers(1, 3),
            st.integers(1, 2),
            st.booleans(),
            st.sampled_from((None, None, 0.9)),
            st.booleans(),
            st.sampled_from((0.0, 0.3, 1.0)),
        )

    return st.sampled_from(("bf16", "fp16", "fp32")).flatmap(rest)
