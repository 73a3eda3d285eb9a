"""The rules, a row each, as data: what a rule keeps, and what it reads of the config. Everything
that tells rules apart reads this table; :mod:`mp_optim.update.rules` adds their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from mp_optim.config.field_kinds import (
    BETA,
    LARGEST,
    OPTIONAL_RATE,
    RATE,
    Check,
    Choice,
    Number,
    Whole,
    as_bool,
)
from mp_optim.config.muon import (
    COEFFICIENT_TYPES,
    MATMUL_PRECISIONS,
    NS_METHODS,
    SCALAR_OPTIMIZERS,
    SCALE_MODES,
    TP_MODES,
)

FIRST_DTYPE, SECOND_DTYPE = "exp_avg_dtype", "exp_avg_sq_dtype"

UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]  # torch's stubs lack it

SECOND_MOMENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
"""What a second moment can be asked to be stored as; uint8 stands for 8-bit codes."""

FIRST_MOMENT_DTYPES = (*SECOND_MOMENT_DTYPES, UINT4)
"""What a first moment, or momentum, can be asked to be stored as; uint8 and uint4 stand for signed
codes of 8 and 4 bits."""

Shape = Callable[[torch.Size], torch.Size | None]
"""Shape of a moment, given that of the whole parameter; None if it is not kept for such a one."""


def _same(shape: torch.Size) -> torch.Size:
    return shape


@dataclass(frozen=True)
class Moment:
    """One of the tensors that a rule keeps of each parameter.

    Attributes:
        name: its key in the state; a name means the same in every rule.
        dtype_field: field of the config that says what it is stored as; None for always FP32.
        shape: from the whole parameter's.
        elementwise: it has an element for each of the parameter, and is split as the parameter is.
            What is not is kept whole by every rank that shares the parameter, with the same bits.
    """

    name: str
    dtype_field: str | None = FIRST_DTYPE
    shape: Shape = _same
    elementwise: bool = True

    @property
    def is_always_kept(self) -> bool:
        """Whether it is kept for parameters of any shape."""
        return self.shape is _same

    def local_shape(self, local: torch.Size, whole: torch.Size) -> torch.Size | None:
        """What a rank keeps that has a part of a parameter, in that part's shape; None if
        nothing."""
        shape = self.shape(whole)
        return local if shape is not None and self.elementwise else shape


@dataclass(frozen=True)
class RuleSpec:
    """One row.

    Attributes:
        name: what ``optimizer`` of the config calls it.
        moments: what it keeps.
        fields: the fields of the config that only some rules read, with what they may be.
        settings: hyperparameters of its class, by the field that each is taken from; a tuple of
            fields becomes a tuple.
        fixed: hyperparameters that the stack sets itself.
        construction: what else its class is constructed with, by field.
        overrides: hyperparameters that a param group may have for itself, beside rates and decays.
        beside_muon: hyperparameters it is given where it steps what muon leaves over.
        reads: what a step of one element depends on: the element, sums over all of the parameter
            (which ranks that share a parameter reduce), or whole matrices.
        has_kernels: backends carry it out, but for those that
            :mod:`mp_optim.config.capabilities` says cannot; else torch operations do, and kernels
            for parts of it where that module says so.
        sample: hyperparameters for the self-test of backends.
    """

    name: str
    moments: tuple[Moment, ...]
    fields: Mapping[str, Check] = field(default_factory=dict)
    settings: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    construction: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    beside_muon: tuple[str, ...] = ()
    reads: Literal["elements", "sums", "matrices"] = "elements"
    has_kernels: bool = True
    sample: Mapping[str, Any] = field(default_factory=dict)

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Keys of its moments."""
        return tuple(moment.name for moment in self.moments)


def _each_row(shape: torch.Size) -> torch.Size | None:
    return torch.Size([*shape[:-1], 1]) if len(shape) >= 2 else None


def _each_column(shape: torch.Size) -> torch.Size | None:
    return torch.Size([*shape[:-2], 1, shape[-1]]) if len(shape) >= 2 else None


def _of_vectors(shape: torch.Size) -> torch.Size | None:
    return shape if len(shape) < 2 else None


_EXP_AVG = Moment("exp_avg")
_EXP_AVG_SQ = Moment("exp_avg_sq", SECOND_DTYPE)
_MOMENTUM = Moment("momentum_buffer")

_ADAM_FIELDS: dict[str, Check] = {
    "adam_beta1": BETA,
    "adam_beta2": BETA,
    "adam_eps": RATE,
    "decoupled_weight_decay": as_bool,
}
_ADAM_SETTINGS: dict[str, str | tuple[str, ...]] = {
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": "adam_eps",
    "adam_w_mode": "decoupled_weight_decay",
}
_ADAM_SAMPLE = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "bias_correction": True,
    "adam_w_mode": True,
}

_ADAM = RuleSpec(
    "adam",
    (_EXP_AVG, _EXP_AVG_SQ),
    _ADAM_FIELDS,
    _ADAM_SETTINGS,
    overrides=("eps", "betas"),
    beside_muon=("betas", "eps"),
    sample=_ADAM_SAMPLE,
)
_LAMB = RuleSpec(
    "lamb",
    (_EXP_AVG, _EXP_AVG_SQ),
    {**_ADAM_FIELDS, "lamb_use_nvlamb": as_bool, "lamb_grad_averaging": as_bool},
    {
        **_ADAM_SETTINGS,
        "grad_averaging": "lamb_grad_averaging",
        "use_nvlamb": "lamb_use_nvlamb",
    },
    fixed={"max_grad_norm": 0.0},  # clip_grad is the stack's one clip
    overrides=("eps", "betas"),
    reads="sums",
    sample={**_ADAM_SAMPLE, "grad_averaging": True, "use_nvlamb": False},
)
_STABLE_ADAMW = RuleSpec(
    "stable_adamw",
    (_EXP_AVG, _EXP_AVG_SQ),
    {name: _ADAM_FIELDS[name] for name in ("adam_beta1", "adam_beta2", "adam_eps")},
    {name: _ADAM_SETTINGS[name] for name in ("betas", "eps")},
    overrides=("eps", "betas"),
    reads="sums",
    sample={name: _ADAM_SAMPLE[name] for name in ("betas", "eps", "bias_correction")},
)
_SGD = RuleSpec(
    "sgd",
    (_MOMENTUM,),
    {"sgd_momentum": Number(0.0, 1.0, said="must be a finite number >= 0, at most 1")},
    {"momentum": "sgd_momentum"},
    overrides=("momentum",),
    sample={"momentum": 0.9, "dampening": 0.0, "nesterov": False},
)
_LION = RuleSpec(
    "lion",
    (_EXP_AVG,),
    {"lion_beta1": BETA, "lion_beta2": BETA},
    {"betas": ("lion_beta1", "lion_beta2")},
    overrides=("betas",),
    beside_muon=("betas",),
    sample={"betas": (0.9, 0.999)},
)
_MUON_SETTINGS: dict[str, str | tuple[str, ...]] = {
    "momentum": "muon_momentum",
    "nesterov": "muon_use_nesterov",
    "num_ns_steps": "muon_num_ns_steps",
    "coefficient_type": "muon_coefficient_type",
    "ns_method": "muon_ns_method",
    "scale_mode": "muon_scale_mode",
    "extra_scale_factor": "muon_extra_scale_factor",
    "tp_mode": "muon_tp_mode",
    "fp32_matmul_prec": "muon_fp32_matmul_prec",
}
_MUON = RuleSpec(
    "muon",
    (_MOMENTUM,),
    {
        "muon_momentum": BETA,
        "muon_use_nesterov": as_bool,
        "muon_split_qkv": as_bool,
        "muon_split_heads": as_bool,
        "muon_scale_mode": Choice(tuple(SCALE_MODES)),
        "muon_extra_scale_factor": Number(
            0.0,
            LARGEST,
            open_low=True,
            said=f"must be a finite number > 0, at most {LARGEST:g}",
        ),
        "muon_fp32_matmul_prec": Choice(
            tuple(MATMUL_PRECISIONS), (("high", "TF32 is not to be had on the host"),)
        ),
        "muon_num_ns_steps": Whole(1, 100, "must be a whole number >= 1, at most 100"),
        "muon_coefficient_type": Choice(tuple(COEFFICIENT_TYPES)),
        "muon_ns_method": Choice(tuple(NS_METHODS)),
        "muon_tp_mode": Choice(
            tuple(TP_MODES),
            (
                (
                    "distributed",
                    "it adds up products in an order that depends on the ranks",
                ),
            ),
        ),
        "muon_scalar_optimizer": Choice(tuple(SCALAR_OPTIMIZERS)),
    },
    _MUON_SETTINGS,
    construction={"scalar_optimizer": "muon_scalar_optimizer"},
    overrides=("eps", "betas", *_MUON_SETTINGS, "qkv_split_shapes", "head_rows"),
    reads="matrices",
    has_kernels=False,
)

_ADAFACTOR = RuleSpec(
    "adafactor",
    (
        Moment("row_var", None, _each_row, elementwise=False),
        Moment("col_var", None, _each_column, elementwise=False),
        Moment("variance", None, _of_vectors),
    ),
    {
        "adafactor_beta2_decay": Number(
            -LARGEST, 0.0, said="must be a finite number <= 0"
        ),
        "adafactor_eps1": OPTIONAL_RATE,
        "adafactor_eps2": RATE,
        "adafactor_clip_threshold": Number(
            1.0, LARGEST, said="must be a finite number >= 1"
        ),
    },
    {
        "beta2_decay": "adafactor_beta2_decay",
        "eps": ("adafactor_eps1", "adafactor_eps2"),
        "d": "adafactor_clip_threshold",
    },
    overrides=("beta2_decay", "eps", "d"),
    reads="sums",
    has_kernels=False,
)

_ALL = (_ADAM, _LAMB, _SGD, _LION, _MUON, _ADAFACTOR, _STABLE_ADAMW)
RULES = {rule.name: rule for rule in _ALL}
"""By name, in the order in which messages list them."""

OPTIMIZERS = tuple(RULES)
"""What a config can ask for."""
KERNEL_RULES = tuple(rule.name for rule in RULES.values() if rule.has_kernels)
"""What backends have kernels for. What Muon does not step as a matrix is stepped by one of these;
of its matrices, backends take the passes over elements."""

RULE_FIELDS = {
    name: check for rule in RULES.values() for name, check in rule.fields.items()
}
"""Fields of the config that only some rules read, with what they may be."""

_MOMENTS = {moment.name: moment for rule in RULES.values() for moment in rule.moments}


def moment_of(key: str) -> Moment:
    """The moment of a key; for one of no rule here, a moment of the parameter's shape."""
    return _MOMENTS.get(key) or Moment(key)


def is_elementwise(key: str) -> bool:
    """Whether state has an element for each of the parameter, and so is split as the parameter
    is."""
    return moment_of(key).elementwise


def rules_of_field(name: str) -> list[RuleSpec]:
    """The rules that read a field of the config."""
    return [rule for rule in RULES.values() if name in rule.fields]


def fields_beside_muon(name: str) -> list[str]:
    """The fields that a rule reads where it steps what muon leaves over."""
    rule = RULES[name]
    sources = [rule.settings[setting] for setting in rule.beside_muon]
    fields: list[str] = []
    for source in sources:
        fields += [source] if isinstance(source, str) else source
    return fields


def rules_in_words(names: tuple[str, ...] = OPTIMIZERS) -> str:
    """ "adam, sgd or lion": some rules, for messages."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
