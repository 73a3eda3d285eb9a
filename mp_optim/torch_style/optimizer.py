"""StackOptimizer: a stack with the signature of a torch optimizer, ``cls(params, **settings)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from mp_optim.config.state_forms import NO_REMAINDER
from mp_optim.factory import inner_optimizer, set_up_host
from mp_optim.planner.sweep import with_chosen_fraction
from mp_optim.precision import MegatronOptimizer, StepResult, WrappedOptimizer
from mp_optim.precision.grad_scaler import ConstantGradScaler
from mp_optim.process.calls import in_own_modes, warn
from mp_optim.quantized import FLOAT8_DTYPES
from mp_optim.ranks.agreement import ProcessGroups
from mp_optim.slots import Slot, group_settings, iter_slots, with_names
from mp_optim.slots.keyed_optimizer import Closure, SlotKeyedOptimizer, matched_groups
from mp_optim.slots.state_dict import plain_groups
from mp_optim.torch_style.settings import config_of
from mp_optim.update import check_serves, executor_of
from mp_optim.update.backends.selection import warn_of_missing_kernels
from mp_optim.update.rules import CLASSES, construction_of, settings_of

_TRAINED = (torch.bfloat16, torch.float16, torch.float32, *FLOAT8_DTYPES)
_OF_BFLOAT16 = {"kahan": "kahan", NO_REMAINDER.name: "none"}
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
        settings: of :class:`~mp_optim.torch_style.settings.StackSettings`.

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
        self._warned_of_fp16 = False
        self._given_settings = dict(settings)
        self.process_groups = ProcessGroups()
        config = config_of(self.rule, settings)
        self._rule = CLASSES[self.rule]([{"params": []}], **construction_of(config), **defaults)
        self._of_rule = tuple(defaults)  # a wrapper (timm's Lookahead) adds its own
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
        if self.config.optimizer_offload_fraction == "auto":
            ranks = self.process_groups
            self.config = with_chosen_fraction(self.config, [container], {}, ranks, None)
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
        self.groups_below = ()
        self._sizes.clear()
        self.step_mark.clear()
        self._begin(self.config)

    def check_param(self, slot: Slot, param: Tensor) -> None:
        if param.dtype not in _TRAINED:
            raise TypeError(
                f"{self.slot_name(slot)} is {param.dtype}: parameters are bfloat16, float16, "
                "float32 or float8; convert the model, or freeze the parameter"
            )
        bits = self.config.param_remainder_bits
        if param.dtype == torch.float16 and bits in _OF_BFLOAT16 and self.config.keeps_remainders:
            raise TypeError(
                f"{self.slot_name(slot)} is float16: main_params={_OF_BFLOAT16[bits]!r} steps "
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
        own = vars(self)  # of which a GradScaler sets two
        scale, found_inf = own.get("grad_scale"), own.get("found_inf")
        if found_inf is None and not self._warned_of_fp16:
            self._warned_of_fp16 = True
            if self._step_supports_amp_scaling:
                warn(_FP16)
        if found_inf is not None and float(found_inf) != 0.0:
            self.last_step = StepResult(False, None, None, "GradScaler found an inf or nan")
            return loss
        self.grad_scaler = None if scale is None else AmpLossScale(scale)
        if "engine" not in own:
            self._build()
        self.last_step = self.unhooked_step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``GradScaler.step`` leaves dividing by the loss scale to :meth:`step`, which does
        it in FP32. torch divides gradients in place, but not those of float16."""
        trained = (param for _, param in iter_slots(self.param_groups) if param.requires_grad)
        return any(param.dtype == torch.float16 for param in trained)

    # -- groups -----------------------------------------------------------------------------------

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
                    every = group_settings(self._rule.param_groups[0]) | self._hyperparameters
                    SlotKeyedOptimizer.add_param_group(self, {**every, **group})
                    self.check_settings(self.param_groups[-1])

    def check_settings(self, group: dict[str, Any]) -> None:
        self._rule.check_settings({**self._rule.defaults, **group})

    def forget_groups(self, count: int) -> None:
        if self._is_built:
            super().forget_groups(count)
        else:
            SlotKeyedOptimizer.forget_groups(self, count)

    def arranged(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """A group as it is given, as the groups that it becomes."""
        return [group]

    # -- state ------------------------------------------------------------------------------------

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
            self.grad_scaler = None
            return False
        match = matched_groups(self.param_groups, state_dict["param_groups"], self.check_settings)
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
