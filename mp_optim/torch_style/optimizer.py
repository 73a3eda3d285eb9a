"""StackOptimizer: a stack with the signature of a torch optimizer, ``cls(params, **settings)``;
what it is asked for beside its rule's hyperparameters becomes a config.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from mp_optim.config import OptimizerConfig
from mp_optim.config.optimizer_config import elsewhere
from mp_optim.config.rules import FIRST_DTYPE, RULES, SECOND_DTYPE
from mp_optim.config.setting_checks import NOT_HERE, Number, nearest, plain_setting
from mp_optim.config.state_forms import KAHAN_IS_GONE, NO_REMAINDER, UINT4
from mp_optim.factory import inner_optimizer, set_up_host
from mp_optim.planner.sweep import with_chosen_fraction
from mp_optim.precision import MegatronOptimizer, StepResult, WrappedOptimizer
from mp_optim.precision.grad_scaler import ConstantGradScaler
from mp_optim.process.calls import in_own_modes, warn
from mp_optim.process.host_memory import same_values
from mp_optim.quantized import FLOAT8_DTYPES
from mp_optim.ranks.agreement import ProcessGroups
from mp_optim.slots import ParamGroups, Slot, group_settings, iter_slots, local_tensor, with_names
from mp_optim.slots.identity import SharedSettings
from mp_optim.slots.keyed_optimizer import Closure, SlotKeyedOptimizer, checked_match
from mp_optim.slots.slot_state import State
from mp_optim.slots.state_dict import plain_groups
from mp_optim.update import check_serves
from mp_optim.update.backends.selection import warn_of_missing_kernels
from mp_optim.update.optimizer import executor_of
from mp_optim.update.rule_classes import CLASSES, construction_of, settings_of

_TRAINED = (torch.bfloat16, torch.float16, torch.float32, *FLOAT8_DTYPES)
_FP16 = (
    "float16 parameters are stepped without a loss scale, and small gradients are lost in float16: "
    "use torch.amp.GradScaler (scaler.scale(loss).backward(), scaler.step(optimizer), "
    "scaler.update()), or bfloat16"
)


class StackOptimizer(WrappedOptimizer):
    """What the classes of :mod:`mp_optim.torch_style` have in common: a stack that looks as a torch
    optimizer does, over any mix of 16-bit and FP32 parameters, with nobody's loss scale but that of
    a ``GradScaler``.

    What steps is built at the first step, or when state is first asked for. Until then parameters
    may be replaced: by ``fully_shard``, by accelerate, by ``model.to(...)``. With
    ``release_gradients`` it is built at once.

    Args:
        params: parameters, named parameters or groups, of any mix of bfloat16, float16 and float32.
        defaults: the rule's hyperparameters.
        settings: of :class:`~mp_optim.torch_style.optimizer.StackSettings`.

    Raises:
        TypeError, ValueError: a setting is unknown, out of range or without effect, naming it.
    """

    rule = "adam"
    last_step: StepResult | None = None
    """What became of the last step: whether it was taken, and the gradient norm before clipping;
    None before the first."""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self._warned_of_fp16 = self._is_begun = False
        self._found_inf: Tensor | None = None
        self._patched_step: Any = None
        # type(optimizer)(params, **optimizer.defaults) builds another one
        defaults = {key: plain_setting(settings.get(key, defaults[key])) for key in defaults}
        settings = {key: value for key, value in settings.items() if key not in defaults}
        self._given_settings = settings
        self.process_groups = ProcessGroups()
        config = config_of(self.rule, settings, [*inspect.signature(type(self)).parameters][1:])
        self._empty = CLASSES[self.rule]([{"params": []}], **construction_of(config), **defaults)
        """The rule's optimizer without parameters, which checks settings."""
        self._of_rule = tuple(defaults)  # a wrapper (timm's Lookahead) adds its own
        # not WrappedOptimizer's, which builds at once what steps
        MegatronOptimizer.__init__(self, params, defaults, config, None)
        warn_of_missing_kernels(config.fused_backend, self.rule, self.param_groups)
        if config.release_gradients:
            self._build()  # the first backward releases already

    # -- what is built late -----------------------------------------------------------------------

    @property
    def stack(self) -> StackOptimizer:
        """This optimizer, with what steps built.

        Raises:
            TypeError: a parameter's dtype cannot be trained, naming it.
        """
        if not self._is_built:
            self._build()
        return self

    @in_own_modes
    def _build(self) -> None:
        container, device = _container(self.param_groups), self.device
        check_serves(self.config.fused_backend, device)
        set_up_host(self.config, device)
        if self._given_settings.get("offload") == "auto":
            asked = replace(self.config, optimizer_offload_fraction="auto")
            self.config = with_chosen_fraction(asked, [container], {}, self.process_groups, None)
        groups = [with_names(group) for group in self.param_groups]
        settings = {**settings_of(self.config), **self._hyperparameters}
        super().lists_are_known()
        try:
            inner = inner_optimizer(self.config, groups, settings)
            executor = executor_of(inner)
            for group, built in zip(self.param_groups, executor.param_groups, strict=True):
                for name, value in group_settings(built).items():
                    group.setdefault(name, value)
            self._build_engine(inner, executor)
        except BaseException:
            self._forget_engine()
            raise

    @property
    def has_modes(self) -> bool:
        """None of these rules has; asking builds nothing."""
        return False

    def _forget_engine(self) -> None:
        self.early_work.stop()
        vars(self).pop("engine", None)
        self.groups_below, self._settings = (), SharedSettings()
        self._sizes.clear()
        self.step_mark.clear()
        self.step_mark.copies.clear()
        self._is_begun = False
        self._begin(self.config)

    @staticmethod
    def check_param(name: str, param: Tensor, config: OptimizerConfig) -> None:
        if param.dtype not in _TRAINED:
            raise TypeError(
                f"{name} is {param.dtype}: parameters are bfloat16, float16, "
                "float32 or float8; convert the model, or freeze the parameter"
            )
        alone = config.param_remainder_bits == NO_REMAINDER.name
        if param.dtype == torch.float16 and alone and config.keeps_remainders:
            raise TypeError(
                f"{name} is float16: main_params='none' steps "
                "bfloat16 parameters as they are; a float16 one has too few exponents for steps to "
                "be rounded into. Convert the model to bfloat16, or leave main_params='fp32'"
            )

    @property
    def _hyperparameters(self) -> dict[str, Any]:
        """The rule's own of ``defaults``, where wrappers (Lookahead's) put theirs, too."""
        return {name: self.defaults[name] for name in self._of_rule}

    # -- stepping ---------------------------------------------------------------------------------

    @_disable_dynamo  # what is built at the first step outlives a trace
    def step(self, closure: Closure | None = None) -> Any:
        """One step; returns the closure's loss, or None. Gradients with an inf or nan change
        nothing, and are told of (:attr:`last_step`, warnings).

        Raises:
            ValueError: a hyperparameter is out of range, naming it; nothing was stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = vars(self).get("grad_scale")
        if self._found_inf is None and not self._warned_of_fp16:
            self._warned_of_fp16 = True
            if self._step_supports_amp_scaling:
                warn(_FP16)
        self.grad_scaler = None if scale is None else AmpLossScale(scale)
        self.check_lists()
        if not self._is_built:
            self._build()
        self._is_begun = True
        self.last_step = self.unhooked_step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``GradScaler.step`` leaves dividing by the loss scale to :meth:`step`, which does
        it in FP32. torch divides gradients in place, but not those of float16."""
        trained = (param for _, param in iter_slots(self.param_groups) if param.requires_grad)
        return any(param.dtype == torch.float16 for param in trained)

    @property
    def found_inf(self) -> Tensor | None:
        """Not 0 if gradients hold an inf or nan. A ``GradScaler`` sets it for one step."""
        return self._found_inf

    @found_inf.setter
    def found_inf(self, value: Tensor | None) -> None:
        del self.found_inf
        self._found_inf = value
        if value is not None and float(value) != 0.0:
            # As of torch's optimizers that are not fused: accelerate takes a call of the step that
            # it has patched for a step that was taken.
            self._patched_step = vars(self).get("step")
            vars(self)["step"] = self._skip

    @found_inf.deleter
    def found_inf(self) -> None:
        if self._found_inf is not None and vars(self).get("step") == self._skip:
            del vars(self)["step"]
            if self._patched_step is not None:
                vars(self)["step"] = self._patched_step
        self._found_inf = self._patched_step = None

    def _skip(self, closure: Closure | None = None) -> None:
        """Stand in for :meth:`step` where a ``GradScaler`` found an inf or nan."""
        self.last_step = StepResult(False, None, None, "GradScaler found an inf or nan")

    # -- groups -----------------------------------------------------------------------------------

    @property
    def param_groups(self) -> ParamGroups:
        """Groups of the parameters that are there now. Until the first step or load they may be
        edited, or assigned anew, whoever has looked at the state meanwhile."""
        return self._live_groups

    @param_groups.setter
    def param_groups(self, groups: ParamGroups) -> None:
        if self._is_built and not self._is_begun and groups is not self._live_groups:
            self._forget_engine()
        SlotKeyedOptimizer.param_groups.__set__(self, groups)  # type: ignore[attr-defined]

    def check_lists(self) -> None:
        """Raise ValueError as every optimizer. What was built for a look at the state is built
        again for edited lists."""
        if self._is_built and not self._is_begun and self.has_edited_lists():
            self._forget_engine()
        super().check_lists()

    def lists_are_known(self) -> None:
        """As of every optimizer; before the first step lists may be edited."""
        if self._is_built:
            super().lists_are_known()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Where it is refused, nothing is changed.

        Raises:
            TypeError, ValueError: what is wrong with a parameter or setting.
        """
        with self.added_whole():
            for group in self.arranged(param_group):
                if self._is_built:
                    super().add_param_group(group)
                else:
                    every = group_settings(self._empty.param_groups[0]) | self._hyperparameters
                    SlotKeyedOptimizer.add_param_group(self, {**every, **group})
                    self.check_settings(self.param_groups[-1])

    def check_settings(self, group: dict[str, Any]) -> None:
        self._empty.check_settings({**self._empty.defaults, **group})

    def forget_groups(self, count: int) -> None:
        if self._is_built:
            super().forget_groups(count)
        else:
            SlotKeyedOptimizer.forget_groups(self, count)

    def arranged(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """A group as it is given, as the groups that it becomes."""
        return [group]

    # -- state ------------------------------------------------------------------------------------

    def reset_states(self, slots: Sequence[Slot]) -> None:
        if self._is_built:  # else there is none
            super().reset_states(slots)

    def assign_states(self, states: Mapping[Slot, State], *, whole: bool) -> None:
        # Lightning puts the state of a new optimizer back as it is, when it moves it to the device.
        has_new = self._is_begun or any(
            not _has_values(self.shown_state(slot), given) for slot, given in states.items()
        )
        super().assign_states(states, whole=whole)
        self._is_begun = has_new

    def load_slot_state(self, slot: Slot, state: State) -> None:
        super().load_slot_state(slot, state)
        self._is_begun = True

    def state_dict(
        self, is_loading: bool = False, *, full_precision: bool = False
    ) -> dict[str, Any]:
        """As torch's: without state before the first step (or look at :attr:`state`)."""
        if not self._is_built:
            return {"state": {}, "param_groups": plain_groups(self.param_groups)}
        self.grad_scaler = None  # a GradScaler saves itself
        return super().state_dict(is_loading, full_precision=full_precision)

    def begins_anew(self, state_dict: Mapping[str, Any]) -> bool:
        """A state dict without state is one from before the first step: state begins anew from the
        model's weights."""
        if state_dict["state"]:
            self.grad_scaler, self._is_begun = None, True
            return False
        match = checked_match(self.param_groups, state_dict["param_groups"], self.check_settings)
        self.last_step = None
        self._forget_engine()
        match.write_settings(self.param_groups)
        return True

    # -- copies -----------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As torch's: a copy is built from what :meth:`__getstate__` gives."""
        return object.__reduce_ex__(self, protocol)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and ``copy.deepcopy``, as torch's: the parameters are part of it, so an
        optimizer that is copied together with its model stays that model's. Hooks are not."""
        groups = [with_names(group) for group in self.param_groups]
        saved = self.state_dict() if self._is_built else None
        return {
            "hyperparameters": self._hyperparameters,
            "defaults": self.defaults,
            "settings": self._given_settings,
            "param_groups": groups,
            "saved": saved,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        StackOptimizer.__init__(
            self, state["param_groups"], state["hyperparameters"], state["settings"]
        )
        self.defaults.update(state["defaults"])
        if state["saved"] is not None:
            self.load_state_dict(state["saved"])


def _has_values(state: State, given: State) -> bool:
    """Whether these values, on whatever device, are those of a slot's state."""
    return all(_is_same(state.get(key), value) for key, value in given.items())


def _is_same(mine: Any, given: Any) -> bool:
    if not isinstance(given, Tensor) or not isinstance(mine, Tensor):
        return type(given) is type(mine) and bool(given == mine)
    one, other = local_tensor(mine), local_tensor(given)
    return one.dtype == other.dtype and same_values(other.to(one.device), one)


def _container(groups: list[dict[str, Any]]) -> nn.Module:
    """The parameters as a module, for the planner."""
    container = nn.Module()
    for index, (_, param) in enumerate(iter_slots(groups)):
        held = param if isinstance(param, nn.Parameter) else nn.Parameter(param.detach())
        container.register_parameter(f"param{index}", held)
    return container


class AmpLossScale(ConstantGradScaler):
    """What a ``GradScaler`` says the loss was multiplied with, for one step; it decides itself what
    comes after.

    Args:
        scale: one element, FP32, on any device.
    """

    def __init__(self, scale: Tensor) -> None:
        super().__init__(1.0)  # on the host: a number's way to a device would be waited for
        self._scale = scale.detach().reshape(1)

    @property
    def was_asked(self) -> bool:
        return True

    def may_shrink(self, scale: float) -> bool:
        return True

    def scale_after(self, scale: float, trackers: Sequence[float], found_inf: bool) -> float | None:
        return None  # the GradScaler's own update says


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
"""Other words for forms of state."""
_REMAINDER_BITS = {"fp32": None, "remainder16": 16, "remainder8": 8, "none": NO_REMAINDER.name}
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
            ``"fp32"``) or ``"remainder8"`` (the upper 24 bits of FP32); or ``"none"``: the
            bfloat16 parameter is all there is, and each step rounds it stochastically, as
            ``stochastic_rounding`` does with state.
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
        ("optim_bits", "use_8bit", "block_wise", "quantize"), "state='8bit' keeps moments in 8 bits"
    ),
    **dict.fromkeys(
        ("state_dtype", "state_precision", "optimizer_state_dtype"), "it is called state here"
    ),
    **dict.fromkeys(("clip", "clipping", "max_norm"), "it is called max_grad_norm here"),
    "learningrate": "it is called lr here",
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
    "kahan_sum": "main_params='remainder16' keeps the lower bits of bfloat16 parameters",
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


def config_of(
    rule: str, settings: Mapping[str, Any], arguments: Sequence[str] = ()
) -> OptimizerConfig:
    """The config of a stack over parameters of any of bfloat16, float16 and float32.

    Args:
        rule: ``optimizer`` of the config.
        settings: of :class:`StackSettings`; those that are left out have their defaults.
        arguments: names of the class's other arguments, for hints.

    Raises:
        TypeError: a name is unknown. ValueError: a value is out of range or does nothing.
    """
    chosen: dict[str, Any] = {**_DEFAULTS, **_without_torchs(settings, arguments)}
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


def _without_torchs(settings: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    kept = {}
    for name, value in settings.items():
        if name in NOT_HERE and value:
            raise ValueError(f"{name}={value!r}: {NOT_HERE[name]}")
        if name in _DEFAULTS:
            kept[name] = value
        elif name not in _FUSED and name not in NOT_HERE:
            raise TypeError(f"unexpected argument {name!r}{_hint(name, arguments)}")
    return kept


def _hint(name: str, arguments: Sequence[str]) -> str:
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
    return text or nearest(name, [*arguments, *_DEFAULTS], 0.6)


def _form(rule: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """How state is kept."""
    dtype = _choice(chosen, "state", _STATES)
    if chosen["main_params"] == "kahan":
        raise ValueError(f"main_params='kahan': {KAHAN_IS_GONE}; use 'remainder16'")
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
        word = str(chosen[name]).lower().removeprefix("torch.")
        meant = next((form for form, words in _FORMS.items() if word in words), "")
        hint = f"; did you mean {meant!r}?" if meant in choices else nearest(word, [*choices], 0.6)
        raise ValueError(f"{name}={chosen[name]!r}: must be one of {list(choices)}{hint}")
    return choices[chosen[name]]


def _limit(max_grad_norm: Any) -> float:
    try:
        return float(_LIMIT(max_grad_norm) or 0.0)
    except ValueError as error:
        raise ValueError(f"max_grad_norm={max_grad_norm!r}: {error}") from None


def _in_words_of_here(message: str) -> str:
    words = "|".join(map(re.escape, _CALLED_HERE))
    return re.sub(rf"\b({words})", lambda match: _CALLED_HERE[match[0]], message)
