"""StackOptimizer: a stack with the signature of a torch optimizer, ``cls(params, **settings)``;
what it is asked for beside its rule's hyperparameters becomes a config.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.config.setting_checks import plain_setting
from mp_optim.config.state_forms import NO_REMAINDER
from mp_optim.core import ParamGroups, Slot, group_settings, iter_slots, local_tensor, with_names
from mp_optim.core.identity import SharedSettings
from mp_optim.core.keyed_optimizer import Closure, SlotKeyedOptimizer
from mp_optim.core.quantized import FLOAT8_DTYPES
from mp_optim.core.slot_state import State
from mp_optim.core.state_dict import checked_match, plain_groups
from mp_optim.factory.build import StackRequest, container_of, inner_optimizer, set_up_host
from mp_optim.factory.host_memory_check import check_host_memory
from mp_optim.factory.offload_fraction import with_chosen_fraction
from mp_optim.factory.rule_registry import construction_of, rule_of, settings_of
from mp_optim.host.calls import in_own_modes, warn
from mp_optim.host.host_memory import same_values
from mp_optim.kernels import check_serves
from mp_optim.kernels.selection import warn_of_missing_kernels
from mp_optim.mixed_precision import MegatronOptimizer, StepResult, WrappedOptimizer
from mp_optim.mixed_precision.grad_scaler import ConstantGradScaler
from mp_optim.mixed_precision.step import take_step
from mp_optim.optimizers.settings import config_of
from mp_optim.process_groups.process_groups import ProcessGroups
from mp_optim.rules.rule_optimizer import RuleOptimizer, executor_of

_TRAINED = (torch.bfloat16, torch.float16, torch.float32, *FLOAT8_DTYPES)
_FP16 = (
    "float16 parameters are stepped without a loss scale, and small gradients are lost in float16: "
    "use torch.amp.GradScaler (scaler.scale(loss).backward(), scaler.step(optimizer), "
    "scaler.update()), or bfloat16"
)


class StackOptimizer(WrappedOptimizer):
    """What the classes of :mod:`mp_optim.optimizers` have in common: a stack that looks as a torch
    optimizer does, over any mix of 16-bit and FP32 parameters, with nobody's loss scale but that of
    a ``GradScaler``.

    What steps is built at the first step, or when state is first asked for. Until then parameters
    may be replaced: by ``fully_shard``, by accelerate, by ``model.to(...)``. With
    ``release_gradients`` it is built at once.

    Args:
        params: parameters, named parameters or groups, of any mix of bfloat16, float16 and float32.
        defaults: the rule's hyperparameters.
        settings: of :class:`~mp_optim.optimizers.settings.StackSettings`.

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
        given = {**construction_of(config), **RULES[self.rule].fixed, **defaults}
        self._empty = RuleOptimizer(rule_of(config), [{"params": []}], **given)
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
        check_serves(self.config.fused_backend, self.device)
        set_up_host(self.config)
        container = container_of(self.param_groups)
        request = StackRequest(self.config, [container], {}, self.process_groups)
        if self._given_settings.get("offload") == "auto":
            asked = replace(self.config, optimizer_offload_fraction="auto")
            self.config = with_chosen_fraction(replace(request, config=asked))
        request = replace(request, config=self.config, param_groups=self.param_groups)
        check_host_memory(request, is_class=True)
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
        for scheduler in self.early_work:
            scheduler.stop()
        vars(self).pop("engine", None)
        self.groups_below, self.shared_settings = (), SharedSettings()
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
        if [len(group["params"]) for group in self._live_groups] != self._sizes:
            self.check_lists()
        if "engine" not in vars(self):
            self._build()
        self._is_begun = True
        self.last_step = take_step(self)
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


class AmpLossScale(ConstantGradScaler):
    """What a ``GradScaler`` says the loss was multiplied with, for one step; it decides itself what
    comes after.

    Args:
        scale: one element, FP32, on any device.
    """

    def __init__(self, scale: Tensor) -> None:
        super().__init__(1.0)  # on the host: a number's way to a device would be waited for
        self._scale = scale.detach().reshape(1)

    def may_shrink(self, scale: float) -> bool:
        return True
