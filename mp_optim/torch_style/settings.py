"""What a torch-shaped class is asked for beside its rule's hyperparameters, as a config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypedDict

import torch

from mp_optim.config import OptimizerConfig
from mp_optim.config.optimizer_config import elsewhere
from mp_optim.config.rules import FIRST_DTYPE, RULES, SECOND_DTYPE
from mp_optim.config.setting_checks import NOT_HERE, Number, nearest
from mp_optim.config.state_forms import NO_REMAINDER, UINT4

_STATES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "8bit": torch.uint8,
    "4bit": UINT4,
}
_AVERAGES = {name: _STATES[name] for name in ("fp32", "bf16")}
_REMAINDER_BITS = {
    "fp32": None,
    "remainder16": 16,
    "remainder8": 8,
    "kahan": "kahan",
    "none": NO_REMAINDER.name,
}
_SAME = (
    "ema_decay",
    "skip_step_sigma_factor",
    "skip_step_rolling_interval_length",
    "log_param_grad_norms",
    "log_update_ratios_interval",
    "audit_rate",
    "audit_action",
)
"""Fields of the config that are settings of the same names."""
_OF_OFFLOADING = (
    "offload_mode",
    "offload_place",
    "stream_window_bytes",
    "optimizer_state_path",
    "release_gradients",
)
"""The same, with ``offload``."""


class StackSettings(TypedDict, total=False):
    """What every class takes by name, beside the hyperparameters of its rule.

    Attributes:
        state: how moments are kept: ``"fp32"`` (the default), ``"bf16"``, ``"fp16"`` with a scale
            for each block of 256, ``"8bit"``, or ``"4bit"``: first moments and momenta in 4 bits,
            second moments in 8.
        min_8bit_size: with ``state="8bit"`` or ``"4bit"``, parameters with fewer elements keep FP32
            moments; 0 (the default) is none, bitsandbytes' own is 4096.
        main_params: what is kept beside a 16-bit parameter: ``"fp32"`` (the default), or of a
            bfloat16 one only what it does not say itself, ``"remainder16"`` (the same bits as
            ``"fp32"``), ``"remainder8"`` (the upper 24 bits of FP32) or ``"kahan"`` (a bfloat16
            compensation); or ``"none"``: the bfloat16 parameter is all there is, and each step
            rounds it stochastically, as ``stochastic_rounding`` does with state.
        stochastic_rounding: round bfloat16, 8-bit and 4-bit state stochastically.
        ema_decay: keep a moving average of every parameter, with this decay a step; None (the
            default) keeps none. ``averaged_weights()`` evaluates with them.
        ema_dtype: of these averages: ``"fp32"`` (the default), or ``"bf16"`` with
            ``stochastic_rounding``.
        offload: share of the parameters' elements that are kept on the host, 0.0 (the default) to
            1.0, or ``"auto"``: as few as the accelerator's memory allows.
        offload_mode: what is done during backward: nothing (``"sync"``, the default), or what the
            field ``offload_mode`` of OptimizerConfig says of ``"overlap"`` and ``"speculative"``.
            The same bits in all three.
        offload_place: where what is offloaded is stepped: ``"host"`` (the default);
            ``"streamed"``: it is kept on the host, comes to the accelerator window by window and
            is stepped there; or ``"auto"``: both at once, in shares that are measured in the first
            steps. The same bits in all three.
        stream_window_bytes: of a window of streamed state, 256 MiB; also text such as ``"64MiB"``.
        optimizer_state_path: a folder on a local disk, where the state of what is offloaded lies
            between steps, in a file that goes with the process; None (the default) is memory.
        release_gradients: with ``offload_mode`` overlap or speculative: gradients of what is
            offloaded leave the accelerator during backward, so that few of them lie there
            at once. ``param.grad`` reads as None then: clip by ``max_grad_norm`` here, and by
            nothing else. The field ``release_gradients`` of OptimizerConfig says more.
        max_grad_norm: clip the norm of all gradients to this; None (the default) does not clip.
        skip_step_sigma_factor: skip steps whose gradient norm, or loss
            (``optimizer.health.report_loss``), is more than so many sigma above the median of the
            last ``skip_step_rolling_interval_length`` steps (128); inf (the default) skips none.
        skip_step_rolling_interval_length: see there.
        log_param_grad_norms: how many of the parameters with the largest gradient norms
            ``metrics()`` shows; 0 (the default) keeps none.
        log_update_ratios_interval: every so many steps compare what the step adds to each parameter
            with its size; 0 (the default) never does.
        audit_rate: share of the elements that each step repeats by other kernels, to compare bits;
            0.0 (the default) repeats none. ``docs/audit.md``.
        audit_action: what comes of other bits: ``"warn"`` (the default) or ``"raise"``.
        backend: what carries the rule out, as ``OptimizerConfig.fused_backend``; ``"auto"``.
        foreach: of torch's; any value will do, for every step here is fused.
        fused: of torch's; any value will do.
        amsgrad: of torch's, and only False: there is none of that here.
        maximize: of torch's, and only False: negate the loss.
        capturable: of torch's, and only False.
        differentiable: of torch's, and only False.
    """

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
    log_update_ratios_interval: int
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
_DEFAULTS: dict[str, Any] = {
    "state": "fp32",
    "min_8bit_size": 0,
    "main_params": "fp32",
    "stochastic_rounding": False,
    "ema_dtype": "fp32",
    "offload": 0.0,
    "max_grad_norm": None,
    "backend": "auto",
    **{name: _DEFAULT_OF_FIELD[name] for name in (*_SAME, *_OF_OFFLOADING)},
}
_FUSED = ("foreach", "fused")
_SAID = "must be > 0, or None to not clip"
_LIMIT = Number(open_low=True, may_be_infinite=True, optional=True, said=_SAID)

_OTHER_NAMES = {
    "learning_rate": "it is called lr here",
    **dict.fromkeys(
        ("optim_bits", "use_8bit", "block_wise"), "state='8bit' keeps moments in 8 bits"
    ),
    "percentile_clipping": "max_grad_norm clips, and skip_step_sigma_factor skips spikes",
    "is_paged": "offload=1.0 keeps state in host memory, and offload='auto' what does not fit",
    **dict.fromkeys(
        ("gpu_memory", "max_memory"),
        "offload='auto' leaves on the accelerator what its memory allows",
    ),
    **dict.fromkeys(
        ("cpu_offload", "offload_optimizer", "offload_fraction", "offload_ratio"),
        "it is called offload here, 0.0 to 1.0 or 'auto'",
    ),
    "offload_gradients": "it is called release_gradients here",
    "bf16_stochastic_round": "it is called stochastic_rounding here, with state='bf16'",
    **dict.fromkeys(
        ("optim", "optimizer", "optimizer_type", "optimizer_name"), "the class says the rule"
    ),
    "use_precision_aware_optimizer": "state and main_params say how state is kept",
    "optimizer_cpu_offload": "offload > 0.0 says it here",
    **dict.fromkeys(
        ("momentum", "nesterov", "ns_steps", "betas", "eps"),
        "this class's rule has no such hyperparameter",
    ),
    **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2"), "give betas=(..., ...)"),
    **dict.fromkeys(("epsilon", "adam_epsilon", "adam_eps"), "it is called eps here"),
    "kahan_sum": "main_params='remainder16' keeps the lower bits of bfloat16 parameters, "
    "main_params='kahan' a compensation",
    **dict.fromkeys(
        ("dtype", "precision", "mixed_precision", "bf16", "fp16"),
        "parameters say their dtype themselves; state and main_params say what is kept",
    ),
}
"""What torch, bitsandbytes, torchao, optimi and DeepSpeed call things, in words of here; the rest
is the config's."""

_OF_CONFIG_ALONE = {*_DEFAULT_OF_FIELD} - {*_DEFAULTS, *("lr", "weight_decay", "optimizer")}

_CALLED_HERE = {
    "use_precision_aware_optimizer=True and ": "",
    "optimizer_cpu_offload=True and ": "",
    "fused_backend": "backend",
    "optimizer_offload_fraction": "offload",
    "clip_grad": "max_grad_norm",
    "exp_avg_dtype": "state",
    "fp32_state_below": "min_8bit_size",
    "exp_avg_sq_dtype": "state",
    "param_remainder_bits": "main_params",
    "store_param_remainders": "main_params",
    **{str(dtype): repr(name) for name, dtype in _STATES.items()},
}
"""What the config says in its messages, and what a caller of a class has written."""


def config_of(rule: str, settings: Mapping[str, Any]) -> OptimizerConfig:
    """The config of a stack over parameters of any of bfloat16, float16 and float32.

    Args:
        rule: ``optimizer`` of the config.
        settings: of :class:`StackSettings`; those that are left out have their defaults.

    Raises:
        TypeError: a name is unknown. ValueError: a value is out of range or does nothing.
    """
    chosen: dict[str, Any] = {**_DEFAULTS, **_without_torchs(settings)}
    try:
        return OptimizerConfig(
            optimizer=rule,
            lr=0.0,  # that of each group applies
            bf16=True,  # which is to say: with main params where they are needed
            clip_grad=_limit(chosen["max_grad_norm"]),
            fused_backend=chosen["backend"],
            fp32_state_below=chosen["min_8bit_size"],
            ema_dtype=_choice(chosen, "ema_dtype", _AVERAGES),
            **{name: chosen[name] for name in _SAME},
            **_form(rule, chosen),
            **_placement(chosen),
        )
    except ValueError as error:
        raise ValueError(_in_words_of_here(str(error))) from None


def _without_torchs(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in settings.items():
        if name in NOT_HERE and value:
            raise ValueError(f"{name}={value!r}: {NOT_HERE[name]}")
        if name in _DEFAULTS:
            kept[name] = value
        elif name not in _FUSED and name not in NOT_HERE:
            raise TypeError(f"unexpected argument {name!r}{_hint(name)}")
    return kept


def _hint(name: str) -> str:
    if name in _OTHER_NAMES:
        return f": {_OTHER_NAMES[name]}"
    if name in _CALLED_HERE:
        return f"; it is called {_CALLED_HERE[name]} here"
    text = _in_words_of_here(elsewhere(name))
    words = re.findall(r"\w+", f"{name} {text}")
    of_config = [word for word in words if word in _OF_CONFIG_ALONE]
    if of_config:
        return (
            f": {of_config[0]} is a field of OptimizerConfig, for get_megatron_optimizer; "
            "this class has no such setting"
        )
    return text or nearest(name, [*_DEFAULTS], 0.6)


def _form(rule: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """How state is kept."""
    dtype = _choice(chosen, "state", _STATES)
    bits = _choice(chosen, "main_params", _REMAINDER_BITS)
    rounding = chosen["stochastic_rounding"] or bits == NO_REMAINDER.name
    stochastic = {} if rounding is False else {"stochastic_rounding": rounding}
    if dtype == torch.float32 and bits is None:
        return stochastic
    stepped_by = [rule, "adam"] if rule == "muon" else [rule]
    moments = [moment for name in stepped_by for moment in RULES[name].moments]
    stored_as = {moment.dtype_field for moment in moments if moment.dtype_field}
    if dtype != torch.float32 and not stored_as:
        raise ValueError(f"state={chosen['state']!r}: {rule} keeps its state in FP32")
    second = torch.uint8 if dtype == UINT4 else dtype  # which has no 4-bit form
    forms = {FIRST_DTYPE: dtype, SECOND_DTYPE: second}
    return {
        "use_precision_aware_optimizer": True,
        **{field: forms[field] for field in stored_as},
        "store_param_remainders": bits is not None,
        **({} if bits is None else {"param_remainder_bits": bits}),
        **stochastic,
    }


def _placement(chosen: Mapping[str, Any]) -> dict[str, Any]:
    how = {name: chosen[name] for name in _OF_OFFLOADING}
    if chosen["offload"] == 0.0 and how.items() <= _DEFAULTS.items():
        return {}
    fraction = {"optimizer_offload_fraction": chosen["offload"]}
    return {"optimizer_cpu_offload": True, **fraction, **how}


def _choice(chosen: Mapping[str, Any], name: str, choices: Mapping[str, Any]) -> Any:
    if chosen[name] not in list(choices):
        raise ValueError(f"{name}={chosen[name]!r}: must be one of {list(choices)}")
    return choices[chosen[name]]


def _limit(max_grad_norm: Any) -> float:
    try:
        return float(_LIMIT(max_grad_norm) or 0.0)
    except ValueError as error:
        raise ValueError(f"max_grad_norm={max_grad_norm!r}: {error}") from None


def _in_words_of_here(message: str) -> str:
    words = "|".join(map(re.escape, _CALLED_HERE))
    return re.sub(rf"\b({words})", lambda match: _CALLED_HERE[match[0]], message)
