"""Keyword arguments that all optimizer classes share, and their conversion into a config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict, TypeVar, get_type_hints

import torch

from mp_optim.config import OptimizerConfig
from mp_optim.config.other_names import ARGUMENTS, hint
from mp_optim.config.rules import FIRST_DTYPE, RULES, SECOND_DTYPE
from mp_optim.config.setting_checks import NOT_HERE, Number, SettingError, nearest
from mp_optim.config.state_forms import NO_REMAINDER, UINT4
from mp_optim.factory.offload_fraction import OFFLOADING

T = TypeVar("T")

_STATES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "8bit": torch.uint8,
    "4bit": UINT4,
}
_AVERAGES = {name: _STATES[name] for name in ("fp32", "bf16")}
_FORMS = {
    "fp32": ("float32", "32", "32bit", "float"),
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half", "16"),
    "8bit": ("int8", "uint8", "8", "8-bit", "8bits", "fp8", "float8"),
    "4bit": ("int4", "uint4", "4", "4-bit", "4bits", "nf4"),
}
"""Synonyms of each storage format, for the hint "did you mean" in errors."""
_REMAINDER_BITS = {"fp32": None, "remainder16": 16, "remainder8": 8, "none": NO_REMAINDER.name}


class StackSettings(TypedDict, total=False):
    """Keyword arguments of each class except Adafactor, in addition to its hyperparameters.

    Attributes:
        overrides: settings of some parameters, as in ``{"*.bias|*norm*": {"weight_decay": 0.0}}``.
            A key is a shell pattern of parameter names, or several patterns separated by ``|``.
            Values are ``lr``, ``weight_decay`` and other hyperparameters of a param group.
        state: storage format of the moments: ``"fp32"``, ``"bf16"``, ``"fp16"`` with a scale for
            each block of 256 elements, ``"8bit"``, or ``"4bit"`` (first moments in 4 bits, second
            moments in 8).
        min_8bit_size: number of elements below which a parameter keeps FP32 moments, with
            ``state="8bit"`` or ``"4bit"``. bitsandbytes' default is 4096.
        main_params: storage format of the main param of a 16-bit parameter: ``"fp32"``; or, for
            bfloat16, ``"remainder16"`` (the 16 bits that bfloat16 drops: the main param has the
            bits of ``"fp32"`` above 4.6e-41, and the parameter rounds ties away from zero),
            ``"remainder8"`` (the upper 8 of these bits), or ``"none"`` (no main param: each step
            rounds the parameter stochastically).
        stochastic_rounding: True to round bfloat16, 8-bit and 4-bit state stochastically.
        ema_decay: decay per step of a moving average of each parameter; None keeps no averages.
            ``averaged_weights()`` evaluates with the averages.
        ema_dtype: dtype of the averages of ``ema_decay``: ``"fp32"``, or ``"bf16"`` with
            ``stochastic_rounding``.
        offload: share of the parameters' elements that have their state in host memory, 0.0 to 1.0;
            or ``"auto"``: the smallest share that fits the accelerator's memory.
        offload_mode: ``"sync"``: the host begins in ``step()``. ``"overlap"``: gradients are copied
            to the host during backward. ``"speculative"``: the host also steps offloaded parameters
            during backward. All three modes give the same bits.
        offload_place: device that steps offloaded parameters: ``"host"``, or ``"streamed"`` for the
            accelerator, window by window. Both values give the same bits.
        stream_window_bytes: size of a window of streamed state in bytes (default 256 MiB), or text
            such as ``"64MiB"``.
        optimizer_state_path: folder on a local disk for an unnamed file with the offloaded state.
            The file is deleted when the process ends. None keeps offloaded state in memory.
        release_gradients: True to free gradients of offloaded parameters on the accelerator during
            backward, with ``offload_mode`` overlap or speculative. ``param.grad`` is then None
            after backward, so other code cannot read or clip the gradient (use ``max_grad_norm``).
            ``step()`` ends with ``zero_grad()``.
        max_grad_norm: limit of the global gradient norm; None does not clip.
        skip_step_sigma_factor: number of sigma above the median of the last steps. A step is
            skipped if its gradient norm or loss (``optimizer.health.report_loss``) is higher; inf
            skips no step.
        skip_step_rolling_interval_length: number of last steps in the median of
            ``skip_step_sigma_factor``.
        log_param_grad_norms: number of parameters with the largest gradient norms that
            ``metrics()`` shows; 0 records no norms.
        audit_rate: share of the elements that each step repeats with ``reference`` to compare bits
            (``docs/audit.md``), 0.0 to 1.0.
        audit_action: reaction to different bits in an audit: ``"warn"`` or ``"raise"``.
        backend: implementation of the step: ``"auto"``, ``"native"``, ``"reference"``, ``"torch"``,
            ``"triton"``, ``"apex"`` or ``"transformer_engine"``
            (``OptimizerConfig.fused_backend``).
        foreach: accepted for compatibility with torch, without effect: every step is fused.
        fused: accepted for compatibility with torch, without effect: every step is fused.
        amsgrad: only False: AMSGrad is not supported.
        maximize: only False: negate the loss instead.
        capturable: only False: steps are not captured in CUDA graphs.
        differentiable: only False: steps are not differentiable.
    """

    overrides: Mapping[str, Mapping[str, Any]] | None
    state: str
    min_8bit_size: int
    main_params: str
    stochastic_rounding: bool
    ema_decay: float | None
    ema_dtype: str
    offload: float | str
    offload_mode: str
    offload_place: str
    stream_window_bytes: int | str
    optimizer_state_path: str | None
    release_gradients: bool
    max_grad_norm: float | None
    skip_step_sigma_factor: float
    skip_step_rolling_interval_length: int
    log_param_grad_norms: int
    audit_rate: float
    audit_action: str
    backend: str
    foreach: bool | None
    fused: bool | None
    amsgrad: bool
    maximize: bool
    capturable: bool
    differentiable: bool


_DEFAULT_OF_FIELD = {field.name: field.default for field in fields(OptimizerConfig)}
_OF_CONFIG = [name for name in StackSettings.__annotations__ if name in _DEFAULT_OF_FIELD]
_OF_OFFLOADING = [name for name in _OF_CONFIG if name in OFFLOADING]
_IN_WORDS = {"ema_dtype": "fp32"}
"""Default words of settings that take a word where the config's field takes a dtype."""
_SAME = [
    name
    for name in _OF_CONFIG
    # ``_form`` sets stochastic_rounding, because main_params="none" needs it.
    if name not in (*_OF_OFFLOADING, *_IN_WORDS, "stochastic_rounding")
]
"""Settings whose value is also the value of the config's field with the same name."""
_DEFAULTS: dict[str, Any] = {
    "overrides": None,
    "state": "fp32",
    "min_8bit_size": 0,
    "main_params": "fp32",
    "offload": 0.0,
    "max_grad_norm": None,
    "backend": "auto",
    **{name: _DEFAULT_OF_FIELD[name] for name in _OF_CONFIG},
    **_IN_WORDS,
}
_OF_TORCH: dict[str, Any] = {"foreach": None, "fused": None, **dict.fromkeys(NOT_HERE, False)}
"""Arguments of torch's optimizers that have no effect here, with their defaults."""


_RAISES = """Raises:
    TypeError: an argument is unknown. A parameter's dtype is checked at the first step.
    ValueError: a value is out of range, contradicts another one, or has no effect.
"""


def with_settings(cls: type[T]) -> type[T]:
    """Replace ``**settings`` of a class by the names of :class:`StackSettings`.

    ``inspect.signature`` (help(), Sphinx, command-line builders) then lists names, types and
    defaults. The class's docstring gets the descriptions of the settings and ``Raises:``. Static
    type checkers read ``Unpack`` instead.

    Args:
        cls: class with a docstring that ends with ``Args:`` and a constructor with ``**settings``.

    Returns:
        ``cls`` itself.
    """
    init: Any = cls.__init__
    init.__annotations__ = get_type_hints(init) | get_type_hints(StackSettings)
    own = [
        parameter.replace(annotation=init.__annotations__.get(name, inspect.Parameter.empty))
        for name, parameter in inspect.signature(init).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default={**_DEFAULTS, **_OF_TORCH}[name],
            annotation=annotation,
        )
        for name, annotation in get_type_hints(StackSettings).items()
    ]
    init.__signature__ = inspect.Signature([*own, *shared], return_annotation=None)
    del init.__annotations__["settings"]
    # ``python -OO`` drops docstrings, so there is nothing to extend.
    if cls.__doc__ and StackSettings.__doc__:
        meanings = inspect.cleandoc(StackSettings.__doc__).partition("Attributes:\n")[2]
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n{meanings}\n\n{_RAISES}"
    return cls


_LIMIT = Number(open_low=True, optional=True)

_ARGUMENT = {
    **{name: ARGUMENTS[name] for name in ("fused_backend", "clip_grad", "fp32_state_below")},
    "optimizer_offload_fraction": "offload",
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), "state"),
    "param_remainder_bits": "main_params",
    "store_param_remainders=False": "main_params='fp32'",
    "store_param_remainders": "main_params",
    **{str(dtype): repr(name) for name, dtype in _STATES.items()},
}
"""The name of an optimizer class's argument for each config field that an error may name."""


def config_of(
    rule: str, settings: Mapping[str, Any], arguments: Sequence[str] = ()
) -> OptimizerConfig:
    """Build the config of a stack over any mix of bfloat16, float16 and float32 parameters.

    Args:
        rule: value of the config's ``optimizer``.
        settings: values of :class:`StackSettings` by name; missing settings have their defaults.
        arguments: names of the class's other arguments, for hints.

    Returns:
        The config. Its ``lr`` is 0.0, because each param group has its own.

    Raises:
        TypeError: the name of a setting is unknown.
        ValueError: a value is out of range, contradicts another value, or has no effect.
    """
    chosen = dict(_DEFAULTS)
    for name, value in settings.items():
        if name in NOT_HERE and value:
            raise ValueError(f"{name}={value!r}: {NOT_HERE[name]}. Set {name}=False")
        if name in _DEFAULTS:
            chosen[name] = value
        elif name not in _OF_TORCH:
            known = [*arguments, *_DEFAULTS]
            way_out = hint(name, known, fields=[*_DEFAULT_OF_FIELD])
            raise TypeError(f"unexpected argument {name!r}{way_out or '; remove it'}")
    placement = {name: chosen[name] for name in _OF_OFFLOADING}
    if chosen["offload"] == 0.0 and placement.items() <= _DEFAULTS.items():
        placement = {}
    else:
        placement["optimizer_cpu_offload"] = True
        placement["optimizer_offload_fraction"] = chosen["offload"]
    try:
        limit = _LIMIT(chosen["max_grad_norm"]) or 0.0
    except ValueError as error:
        raise SettingError("max_grad_norm", chosen["max_grad_norm"], str(error)) from error
    try:
        return OptimizerConfig(
            optimizer=rule,
            lr=0.0,  # The config needs a rate, but only the lr of each param group is used.
            bf16=True,  # bf16 selects the wrapper that builds main params for 16-bit parameters.
            clip_grad=limit,
            fused_backend=chosen["backend"],
            fp32_state_below=chosen["min_8bit_size"],
            ema_dtype=_choice(chosen, "ema_dtype", _AVERAGES),
            **{name: chosen[name] for name in _SAME},
            **_form(rule, chosen),
            **placement,
        )
    except SettingError as error:
        name = _ARGUMENT.get(error.name, error.name)
        words = "|".join(map(re.escape, _ARGUMENT))
        reason = re.sub(rf"\b({words})", lambda match: _ARGUMENT[match[0]], error.reason)
        raise SettingError(name, chosen.get(name, error.value), reason) from error


def _form(rule: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's fields for the storage formats of moments and main params."""
    dtype = _choice(chosen, "state", _STATES)
    bits = _choice(chosen, "main_params", _REMAINDER_BITS)
    rounding = chosen["stochastic_rounding"] or bits == NO_REMAINDER.name
    stochastic = {} if rounding is False else {"stochastic_rounding": rounding}
    if dtype == torch.float32 and bits is None:
        return stochastic
    stepped_by = [rule, "adam"] if rule == "muon" else [rule]
    moments = [moment for name in stepped_by for moment in RULES[name].moments]
    stored_as = {moment.dtype_field for moment in moments if moment.dtype_field}
    second = torch.uint8 if dtype == UINT4 else dtype  # Second moments have no 4-bit format.
    forms = {FIRST_DTYPE: dtype, SECOND_DTYPE: second}
    return {
        "use_precision_aware_optimizer": True,
        **{field: forms[field] for field in stored_as},
        "store_param_remainders": bits is not None,
        **({} if bits is None else {"param_remainder_bits": bits}),
        **stochastic,
    }


def _choice(chosen: Mapping[str, Any], name: str, choices: Mapping[str, Any]) -> Any:
    if chosen[name] not in list(choices):
        word = str(chosen[name]).lower().removeprefix("torch.")
        meant = next((form for form, words in _FORMS.items() if word in words), "")
        hint = f"; did you mean {meant!r}?" if meant in choices else nearest(word, [*choices], 0.6)
        raise ValueError(f"{name}={chosen[name]!r}: must be one of {list(choices)}{hint}")
    return choices[chosen[name]]
