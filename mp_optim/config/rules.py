"""Table of the optimizer rules: the state that each rule keeps per parameter, and its
hyperparameters.

The config, param groups, checks, checkpoints and the planner read this table; :mod:`mp_optim.rules`
has the steps. The second half lists the kernels of each ``fused_backend``. The config checks the
kernels, and ``mp-optim doctor`` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from mp_optim.config.setting_checks import (
    BETA,
    FINITE,
    LARGEST,
    NOT_HERE,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    UP_TO_1,
    WHOLE,
    Check,
    Choice,
    Number,
    as_betas,
    as_bool,
    as_flag,
    check_schedule,
    check_setting,
    whole,
)
from mp_optim.config.state_forms import FIRST_FORMS, FP32, SECOND_FORMS, StateForm

# -- Muon's formulas ------------------------------------------------------------------------------

Polynomial = tuple[float, float, float]
"""Coefficients (a, b, c) of one Newton-Schulz step: X <- a X + b (X X^T) X + c (X X^T)^2 X."""

POLYNOMIALS: dict[str, tuple[Polynomial, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""Polynomials of the Newton-Schulz steps, by coefficient type.

simple: one polynomial for all steps (Jordan 2024, https://kellerjordan.github.io/posts/muon/), as
in torch.optim.Muon. quintic: a cycle of five polynomials, optimized together (Cesista,
https://leloykun.github.io/ponder/muon-opt-coeffs/). polar_express: each polynomial is optimal after
the previous polynomials (Amsel et al. 2025, arXiv:2505.16932), and the last polynomial is repeated.
"""

COEFFICIENT_TYPES = tuple(POLYNOMIALS)
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")


def coefficients(kind: str, steps: int) -> tuple[Polynomial, ...]:
    """Return the polynomial of each Newton-Schulz step.

    Args:
        kind: key of :data:`POLYNOMIALS`.
        steps: number of steps.

    Raises:
        ValueError: ``steps`` is not a whole number >= 1, or ``kind`` is ``quintic`` and ``steps``
            is no multiple of 5.
    """
    table = POLYNOMIALS[kind]
    if steps < 1 or steps != int(steps):
        raise ValueError(f"num_ns_steps={steps!r}: must be a whole number >= 1")
    if kind == "quintic" and steps % len(table):
        raise ValueError(
            f"num_ns_steps={steps!r}: coefficient_type='quintic' is a cycle of {len(table)} "
            f"polynomials; set a multiple of {len(table)}, or coefficient_type='simple' or "
            "'polar_express'"
        )
    if kind == "polar_express":
        return table[:steps] + table[-1:] * (steps - len(table))
    return table * (steps // len(table))


def scale_factor(mode: str, rows: int, columns: int) -> float:
    """Return the factor of an orthogonalized update.

    - spectral: sqrt(max(rows, columns)), for an RMS of 1 over the elements of any shape. Liu et al.
      2025 (arXiv:2502.16982) multiply this factor by 0.2 to match AdamW.
    - unit_rms_norm: sqrt(rows / columns), for a matrix of RMS-to-RMS operator norm 1 (Pethick et
      al. 2025, arXiv:2502.07529).
    - shape_scaling: sqrt(max(1, rows / columns)) (Jordan 2024).

    Args:
        mode: one of :data:`SCALE_MODES`.
        rows: number of output features.
        columns: number of input features.
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns, 1))
    ratio = rows / max(columns, 1)
    return math.sqrt(ratio if mode == "unit_rms_norm" else max(1.0, ratio))


# -- parts of a table row -------------------------------------------------------------------------

FIRST_DTYPE, SECOND_DTYPE = "exp_avg_dtype", "exp_avg_sq_dtype"

Shape = Callable[[torch.Size], torch.Size]
"""Function from the shape of the whole parameter to the shape of a moment."""


@dataclass(frozen=True)
class Moment:
    """A tensor that a rule keeps for each parameter.

    Attributes:
        name: key in the state, with one meaning in all rules.
        dtype_field: field of the config with the moment's storage format; None for always FP32.
        shape: function from the whole parameter's shape to the moment's shape; None for the same
            shape.
        elementwise: True if the moment has one element per parameter element and is sharded like
            the parameter. Otherwise every rank with a shard of the parameter keeps the whole
            moment, with the same bits. Plain tensor parallelism along a dimension that the moment
            lacks also leaves the moment whole.
    """

    name: str
    dtype_field: str | None = FIRST_DTYPE
    shape: Shape | None = None
    elementwise: bool = True

    @property
    def forms(self) -> tuple[StateForm, ...]:
        """The storage formats that this moment supports."""
        if self.dtype_field is None:
            return (FP32,)
        return SECOND_FORMS if self.dtype_field == SECOND_DTYPE else FIRST_FORMS

    def local_shape(self, local: torch.Size, whole: torch.Size) -> torch.Size:
        """Return the shape of the moment on a rank with a shard of a parameter.

        Args:
            local: shape of the shard.
            whole: shape of the whole parameter.
        """
        return local if self.elementwise or self.shape is None else self.shape(whole)


@dataclass(frozen=True)
class Hyperparameter:
    """One hyperparameter of a rule, with its checks and its fields of the config.

    All rules also have ``lr`` and ``weight_decay``, which the table does not list.

    Attributes:
        name: name in constructors and param groups.
        allowed: check of values in constructors and param groups; None if the code of the rule
            checks values.
        default: default of :class:`~mp_optim.rules.rule_optimizer.RuleOptimizer`. A class such as
            ``mp_optim.Lion`` may have another one.
        fields: fields of the config with the value, and their checks; several fields make a tuple.
        per_group: True if a param group may have its own value.
    """

    name: str
    allowed: Check | None
    default: Any
    fields: Mapping[str, Check] = field(default_factory=dict)
    per_group: bool = False


@dataclass(frozen=True)
class RuleSpec:
    """One optimizer rule, a row of the table.

    Attributes:
        name: value of the config's ``optimizer``.
        moments: tensors that the rule keeps for each parameter.
        hyperparameters: hyperparameters, in the order of their checks.
        other_fields: fields of the config that only this rule reads and that are not
            hyperparameters, with their checks.
        fixed: hyperparameters that the stack sets itself.
        reads: data that the update of one element depends on: the element, sums over the whole
            parameter (reduced over the ranks with its shards), or whole matrices.
        has_kernels: True if backends have kernels for the whole step, except as :class:`Capability`
            restricts a backend. Otherwise torch operations compute the step, and kernels compute
            only elementwise passes.
        trial: hyperparameters that differ from the defaults in the self-test of backends.
    """

    name: str
    moments: tuple[Moment, ...]
    hyperparameters: tuple[Hyperparameter, ...]
    other_fields: Mapping[str, Check] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    reads: Literal["elements", "sums", "matrices"] = "elements"
    has_kernels: bool = True
    trial: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def moment_names(self) -> tuple[str, ...]:
        return tuple(moment.name for moment in self.moments)

    @property
    def fields(self) -> dict[str, Check]:
        """The fields of the config that this rule reads, with their checks. Fields that all
        rules read are left out."""
        fields: dict[str, Check] = {}
        for each in self.hyperparameters:
            fields |= each.fields
        return {**fields, **self.other_fields}

    @property
    def settings(self) -> dict[str, str | tuple[str, ...]]:
        """The config's field, or tuple of fields, of each hyperparameter by name."""
        return {
            each.name: next(iter(each.fields)) if len(each.fields) == 1 else tuple(each.fields)
            for each in self.hyperparameters
            if each.fields
        }

    @property
    def overrides(self) -> tuple[str, ...]:
        """Names of the rule's own hyperparameters that a param group may override. ``lr`` and
        ``weight_decay``, which every rule allows, are not listed.

        If the optimizer is muon, the rule named by ``muon_scalar_optimizer`` takes only these
        hyperparameters from the config.
        """
        return tuple(each.name for each in self.hyperparameters if each.per_group)

    @property
    def defaults(self) -> dict[str, Any]:
        return {each.name: each.default for each in self.hyperparameters}

    def check(self, group: Mapping[str, Any]) -> None:
        """Check each setting of a param group separately.

        Args:
            group: settings by name, with all hyperparameters of the rule.

        Raises:
            ValueError: a setting is out of range or not supported.
        """
        check_schedule(group)
        for name, instead in NOT_HERE.items():
            if group.get(name):
                raise ValueError(
                    f"{name}={group[name]!r}: {instead}. Set {name}=False in the param group, or "
                    "in the state dict that the group is loaded from"
                )
        if group.get("cautious_wd") and "cautious_wd" not in self.defaults:
            raise ValueError(
                f"cautious_wd=True: {self.name} has no such setting; remove cautious_wd"
            )
        for each in self.hyperparameters:
            if each.allowed is not None:
                check_setting(each.name, group[each.name], each.allowed)


# -- the rows -------------------------------------------------------------------------------------


def _tuned(name: str, allowed: Check, default: Any, **fields: Check) -> Hyperparameter:
    """Return a hyperparameter that param groups may override."""
    return Hyperparameter(name, allowed, default, fields, per_group=True)


def _chosen(
    name: str, field: str, choices: tuple[str | None, ...], default: str | None, **elsewhere: str
) -> Hyperparameter:
    """Return a hyperparameter that allows some words, and that param groups may override."""
    check = Choice(choices, tuple(elsewhere.items()))
    return _tuned(name, check, default, **{field: check})


_EXP_AVG = Moment("exp_avg")
_EXP_AVG_SQ = Moment("exp_avg_sq", SECOND_DTYPE)
_MOMENTUM = Moment("momentum_buffer")
_MOMENT2 = Moment(
    "moment2_buffer", None, lambda shape: torch.Size([*shape[:-1], 1]), elementwise=False
)
"""Muon's second moment: one FP32 value for each row of a matrix."""

_BETAS = _tuned("betas", as_betas, (0.9, 0.999), adam_beta1=BETA, adam_beta2=BETA)
_EPS = _tuned("eps", NOT_NEGATIVE, 1e-8, adam_eps=RATE)
_BIAS_CORRECTION = Hyperparameter("bias_correction", as_flag, True)
_ADAM_W_MODE = Hyperparameter("adam_w_mode", as_flag, True, {"decoupled_weight_decay": as_bool})
_CAUTIOUS_WD = _tuned("cautious_wd", as_flag, False, cautious_wd=as_bool)
_FACTOR = Number(0.0, LARGEST, open_low=True)

_ADAM = RuleSpec(
    "adam", (_EXP_AVG, _EXP_AVG_SQ), (_BETAS, _EPS, _BIAS_CORRECTION, _ADAM_W_MODE, _CAUTIOUS_WD)
)
_LAMB = RuleSpec(
    "lamb",
    (_EXP_AVG, _EXP_AVG_SQ),
    (
        _BETAS,
        replace(_EPS, default=1e-6),
        _BIAS_CORRECTION,
        _ADAM_W_MODE,
        Hyperparameter("max_grad_norm", NOT_NEGATIVE, 1.0),
        Hyperparameter("use_nvlamb", as_flag, False, {"lamb_use_nvlamb": as_bool}),
        Hyperparameter("grad_averaging", as_flag, True, {"lamb_grad_averaging": as_bool}),
    ),
    # The stack clips gradients with clip_grad, so LAMB must not clip gradients again.
    fixed={"max_grad_norm": 0.0},
    reads="sums",
    trial={"eps": 1e-8},
)
_SGD = RuleSpec(
    "sgd",
    (_MOMENTUM,),
    (
        _tuned("momentum", NOT_NEGATIVE, 0.0, sgd_momentum=UP_TO_1),
        Hyperparameter("dampening", FINITE, 0.0),
        Hyperparameter("nesterov", as_flag, False),
    ),
    trial={"momentum": 0.9},
)
_LION = RuleSpec(
    "lion",
    (_EXP_AVG,),
    (_tuned("betas", as_betas, (0.95, 0.98), lion_beta1=BETA, lion_beta2=BETA), _CAUTIOUS_WD),
    trial={"betas": (0.9, 0.999)},
)
_MUON = RuleSpec(
    "muon",
    (_MOMENTUM, _MOMENT2),
    (
        # muon has no fields for betas and eps, because the config sets both for
        # muon_scalar_optimizer, which steps the other parameters.
        replace(_BETAS, fields={}),
        replace(_EPS, fields={}),
        _BIAS_CORRECTION,
        replace(_ADAM_W_MODE, fields={}),
        _tuned("momentum", BETA, 0.95, muon_momentum=BETA),
        _tuned("nesterov", as_flag, False, muon_use_nesterov=as_bool),
        _chosen("scale_mode", "muon_scale_mode", SCALE_MODES, "spectral"),
        _tuned("extra_scale_factor", POSITIVE, 1.0, muon_extra_scale_factor=_FACTOR),
        _chosen(
            "fp32_matmul_prec",
            "muon_fp32_matmul_prec",
            ("medium", "highest"),
            "medium",
            high="TF32 is not available on CPUs",
        ),
        _tuned("num_ns_steps", WHOLE, 5, muon_num_ns_steps=whole(1, 100)),
        _chosen("coefficient_type", "muon_coefficient_type", COEFFICIENT_TYPES, "quintic"),
        _chosen("ns_method", "muon_ns_method", ("standard", "gram"), "standard"),
        _chosen(
            "tp_mode",
            "muon_tp_mode",
            ("duplicated", "blockwise"),
            "duplicated",
            distributed=(
                "this mode is not supported, because the order of additions depends on the ranks"
            ),
        ),
        Hyperparameter("qkv_split_shapes", None, None, per_group=True),
        _chosen(
            "moment2_method",
            "muon_moment2_method",
            (None, "normuon"),
            None,
            adamuon="a second moment per element is not supported",
            namo="a second moment per matrix is not supported",
        ),
        _tuned("beta2", BETA, 0.95, muon_beta2=BETA),
        _CAUTIOUS_WD,
    ),
    other_fields={"muon_split_qkv": as_bool, "muon_scalar_optimizer": Choice(("adam", "lion"))},
    reads="matrices",
    has_kernels=False,
)
RULES = {rule.name: rule for rule in (_ADAM, _LAMB, _SGD, _LION, _MUON)}
"""Rules by name, in the order in which messages list them."""
OPTIMIZERS = tuple(RULES)
"""Values of the config's ``optimizer``."""
KERNEL_RULES = tuple(rule.name for rule in RULES.values() if rule.has_kernels)
"""Rules that backends have kernels for. One of these rules steps muon's other parameters; for
muon's matrices, backends have kernels for the elementwise passes."""
RULE_FIELDS = {name: check for rule in RULES.values() for name, check in rule.fields.items()}
"""Fields of the config that only some rules read, with their checks."""
_MOMENTS = {moment.name: moment for rule in RULES.values() for moment in rule.moments}


def moment_of(key: str) -> Moment:
    """Return the moment with a state key. An unknown key gives a moment of the parameter's
    shape."""
    return _MOMENTS.get(key) or Moment(key)


def rules_in_words(names: tuple[str, ...] = OPTIMIZERS) -> str:
    """Return names of rules as words of a message, such as ``"adam, sgd or lion"``."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


# -- backends -------------------------------------------------------------------------------------

BACKENDS = ("auto", "native", "reference", "torch", "triton", "apex", "transformer_engine")


@dataclass(frozen=True)
class Capability:
    """Features that the kernels of one backend support.

    Attributes:
        rules: rules with kernels.
        others_by_reference: True if the backend ``reference`` steps the rules without kernels, and
            ``describe()`` shows this; False if a config with such a rule is refused.
        compact: True if every storage format, stochastic rounding and ``cautious_wd`` are
            supported.
        bf16_state: rules that support bfloat16 for all moments, and 16-bit remainders; read only if
            ``compact`` is False.
    """

    rules: tuple[str, ...] = KERNEL_RULES
    others_by_reference: bool = False
    compact: bool = True
    bf16_state: tuple[str, ...] = ()


OWN_BITS = ("torch", "apex", "transformer_engine")
"""Backends that may give other bits than ``reference``."""
CAPABILITIES = {
    "auto": Capability(others_by_reference=True),
    "native": Capability(),
    "reference": Capability(others_by_reference=True),
    "torch": Capability(("adam", "sgd"), others_by_reference=True, compact=False),
    "apex": Capability(("adam", "lamb", "sgd"), compact=False),
    "transformer_engine": Capability(("adam", "sgd"), compact=False, bf16_state=("adam",)),
}


def cautious_decay_refusal(backend: str) -> str:
    """Return the reason why a backend does not support ``cautious_wd``; empty if the backend
    does."""
    if CAPABILITIES.get(backend, Capability()).compact:
        return ""
    return f"fused_backend={backend!r} has no kernels for cautious_wd; choose another backend"


def refusal(
    backend: str,
    rule: str,
    moments: Sequence[torch.dtype],
    remainder_bits: int | str | None,
    stochastic: bool,
) -> tuple[str, str] | None:
    """Return the first field of the config that a backend does not support, with a reason.

    Args:
        backend: ``fused_backend``.
        rule: name of the rule that the backend steps.
        moments: ``exp_avg_dtype`` and ``exp_avg_sq_dtype``.
        remainder_bits: ``param_remainder_bits``; None without remainders.
        stochastic: ``stochastic_rounding``.

    Returns:
        Name of the field and end of the error message; None if the backend supports all fields.
    """
    can = CAPABILITIES.get(backend, Capability())
    if rule not in can.rules and not can.others_by_reference:
        return "fused_backend", (
            f"has no kernels for optimizer={rule!r}; choose fused_backend='auto', or an optimizer "
            f"of {list(can.rules)}"
        )
    if can.compact:
        return None
    used = {moment.dtype_field for moment in RULES[rule].moments}
    dtypes = zip((FIRST_DTYPE, SECOND_DTYPE), moments, strict=True)
    kept = {name: dtype for name, dtype in dtypes if name in used}
    has_bf16 = rule in can.bf16_state
    if {*kept.values()} - {torch.float32} and not (
        has_bf16 and {*kept.values()} == {torch.bfloat16}
    ):
        field = next(name for name, dtype in kept.items() if dtype != torch.float32)
        why = "keeps moments in torch.float32"
        why += ", or both of them in torch.bfloat16; " if has_bf16 else "; "
    elif remainder_bits is not None and not has_bf16:
        field = "store_param_remainders"
        why = "keeps main params in float32; set store_param_remainders=False, or "
    elif remainder_bits not in (None, 16):
        field, why = "param_remainder_bits", "keeps remainders of 16 bits; "
    elif stochastic:
        field, why = "stochastic_rounding", "rounds to nearest; "
    else:
        return None
    return field, f"fused_backend={backend!r} {why}choose another backend"


def audit_refusal(rule: str, backend: str) -> str | None:
    """Return the reason why ``reference`` cannot repeat a sample of a step with the same bits.

    Args:
        rule: name of the rule.
        backend: ``fused_backend``.

    Returns:
        End of the error message; None if audits are supported.
    """
    if rule not in RULES or RULES[rule].reads != "elements":
        audited = rules_in_words(tuple(name for name in RULES if RULES[name].reads == "elements"))
        reads = RULES[rule].reads if rule in RULES else "an unknown part"
        return (
            f"an audit repeats single elements, and {rule} reads {reads} of whole parameters; "
            f"choose {audited}, or set audit_rate=0.0"
        )
    if backend in OWN_BITS:
        return (
            f"an audit compares bits with reference, and fused_backend={backend!r} gives other "
            "bits; set fused_backend='auto' or audit_rate=0.0"
        )
    return None
