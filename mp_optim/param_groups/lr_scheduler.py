"""Schedules of learning rate and weight decay over the number of steps or samples."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from mp_optim.host.calls import warn, weak_method

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_STYLES = ("constant", "linear", "cosine")


def decay_factor(style: str, done: float) -> float:
    """Return the remaining share of ``max - min`` in a decay: 1.0 at its start, 0.0 at its end.

    Args:
        style: one of :data:`WSD_STYLES`; other styles count as linear. ``exponential`` is 2 *
            0.5**done - 1, as in Megatron.
        done: completed share of the decay, or of WSD's cooldown, 0.0 to 1.0.
    """
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if style == "exponential":
        return float(2.0 * 0.5**done - 1.0)
    return 1.0 - (math.sqrt(done) if style == "minus_sqrt" else done)


class OptimizerParamScheduler:
    """Scheduler of ``lr`` and ``weight_decay`` in the param groups of an optimizer.

    ``max_lr``, ``min_lr``, ``start_wd``, ``end_wd``, ``wd_mult`` and ``lr_mult`` of a param group
    take precedence over the arguments. Groups of :func:`mp_optim.get_megatron_optimizer` have
    ``max_lr``, and ``min_lr`` if the config sets it. Learning rates that are tensors are filled in
    place. All ``*_steps`` have the unit of :meth:`step`, such as steps or samples.

    A state dict of the optimizer has the saved limits (``max_lr``, ``min_lr``, ``start_wd``,
    ``end_wd``) of its groups. ``use_checkpoint_opt_param_scheduler`` and
    ``override_opt_param_scheduler`` decide between the saved limits and the limits at construction.
    Optimizer and scheduler may be loaded in either order.

    Args:
        optimizer: optimizer, or another object with ``param_groups``.
        init_lr: learning rate at the start of the warmup.
        max_lr: highest learning rate.
        min_lr: lowest learning rate; None for 0.0.
        lr_warmup_steps: number of steps of the warmup.
        lr_decay_steps: number of steps of the whole schedule, warmup included.
        lr_decay_style: constant, linear, cosine, inverse-square-root or WSD (warmup, stable,
            decay).
        start_wd: weight decay at the start of its ramp.
        end_wd: weight decay at the end of its ramp.
        wd_incr_steps: number of steps of the ramp.
        wd_incr_style: shape of the ramp: constant, linear or cosine.
        use_checkpoint_opt_param_scheduler: True to load settings from the checkpoint. A warning
            names the settings that differ from this object's.
        override_opt_param_scheduler: True to keep this object's settings, and each group's limits
            at construction, when the optimizer or the scheduler is loaded. Loading the optimizer
            then also sets ``lr`` and ``weight_decay`` again.
        wsd_decay_steps: number of steps of WSD's cooldown; required for WSD.
        lr_wsd_decay_style: shape of WSD's cooldown: linear, cosine, exponential or minus_sqrt;
            required for WSD.

    Raises:
        ValueError: an argument is out of range, or contradicts another argument.
    """

    _LIMITS = ("max_lr", "min_lr", "start_wd", "end_wd")
    _SETTINGS = (
        *("max_lr", "min_lr", "init_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"),
        *("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style"),
        *("wsd_decay_steps", "lr_wsd_decay_style"),
    )

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float | None,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.init_lr, self.max_lr, self.min_lr = init_lr, max_lr, min_lr or 0.0
        self.lr_warmup_steps, self.lr_decay_steps = lr_warmup_steps, lr_decay_steps
        self.lr_decay_style = lr_decay_style
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.wsd_decay_steps, self.lr_wsd_decay_style = wsd_decay_steps, lr_wsd_decay_style
        self._limits = self._limits_of_groups()
        self.num_steps = 0
        self._check()
        tops = {group.get("max_lr", max_lr) for group in optimizer.param_groups}
        if tops and max_lr not in tops:
            warn(
                f"max_lr={max_lr!r} has no effect: every param group has its own max_lr, "
                f"{sorted(tops)}; set OptimizerConfig.lr, or max_lr of the groups"
            )
        hooked = optimizer
        while hooked is not None and not hasattr(hooked, "_optimizer_load_state_dict_post_hooks"):
            hooked = getattr(hooked, "optimizer", None)  # Wrappers store their optimizer here.
        if hooked is not None:
            handle = hooked.register_load_state_dict_post_hook(weak_method(self._after_load))
            weakref.finalize(self, handle.remove)
        self.step(0)

    def _check(self) -> None:
        wsd, end = self.lr_decay_style == "WSD", self.lr_decay_steps
        rules = {
            "lr_decay_style": (self.lr_decay_style in LR_STYLES, f"one of {LR_STYLES}"),
            "wd_incr_style": (self.wd_incr_style in WD_STYLES, f"one of {WD_STYLES}"),
            "min_lr": (0.0 <= self.min_lr <= self.max_lr, f"in [0, max_lr={self.max_lr}]"),
            "init_lr": (0.0 <= self.init_lr <= self.max_lr, f"in [0, max_lr={self.max_lr}]"),
            "lr_decay_steps": (self.lr_decay_steps > 0, "> 0"),
            "lr_warmup_steps": (0 <= self.lr_warmup_steps < end, f"in [0, lr_decay_steps={end})"),
            "end_wd": (0.0 <= self.start_wd <= self.end_wd, ">= start_wd >= 0"),
            "wd_incr_steps": (
                self.wd_incr_style == "constant" or self.wd_incr_steps > 0,
                "> 0 for a ramp",
            ),
            "wsd_decay_steps": (
                not wsd or (self.wsd_decay_steps is not None and 0 < self.wsd_decay_steps <= end),
                f"in (0, lr_decay_steps={end}] for WSD",
            ),
            "lr_wsd_decay_style": (
                not wsd or self.lr_wsd_decay_style in WSD_STYLES,
                f"one of {WSD_STYLES} for WSD",
            ),
        }
        for name, (good, rule) in rules.items():
            if not good:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {rule}")
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            raise ValueError(
                f"end_wd={self.end_wd!r}: must equal start_wd={self.start_wd!r} for wd_incr_style="
                "'constant'"
            )

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the learning rate of a param group at ``num_steps``, before ``lr_mult``.

        Args:
            param_group: param group; its ``max_lr`` and ``min_lr`` take precedence.
        """
        top: float = param_group.get("max_lr", self.max_lr)
        floor: float = param_group.get("min_lr", self.min_lr)
        done, warmup, end = self.num_steps, self.lr_warmup_steps, self.lr_decay_steps
        if warmup > 0 and done <= warmup:
            start = min(self.init_lr, top)
            return start + (top - start) * done / warmup
        if self.lr_decay_style == "constant":
            return top
        if done > end:
            return floor
        if self.lr_decay_style == "inverse-square-root":
            return max(floor, top * math.sqrt(max(warmup, 1)) / math.sqrt(max(done, 1)))
        if self.lr_decay_style == "WSD":
            length = self.wsd_decay_steps or end
            since = max(0, done - (end - length))
            left = decay_factor(self.lr_wsd_decay_style or "linear", since / length)
        else:
            left = decay_factor(self.lr_decay_style, (done - warmup) / (end - warmup))
        return floor + (top - floor) * left

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Return the weight decay of a param group at ``num_steps``, before ``wd_mult``.

        Args:
            param_group: param group; its ``start_wd`` and ``end_wd`` take precedence. None for the
                arguments of this object.
        """
        group = param_group or {}
        start, end = group.get("start_wd", self.start_wd), group.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps >= self.wd_incr_steps:
            return float(end)
        left = decay_factor(self.wd_incr_style, self.num_steps / self.wd_incr_steps)
        return float(end - (end - start) * left)

    def step(self, increment: int = 1) -> None:
        """Advance the schedule, and set every group's ``lr`` and ``weight_decay``.

        Args:
            increment: number to add to ``num_steps``, in steps or samples.
        """
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            lr = self.get_lr(group) * group.get("lr_mult", 1.0)
            if isinstance(group["lr"], Tensor):
                with torch.no_grad():
                    group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return settings and ``num_steps`` as a dict of numbers and strings."""
        return {name: getattr(self, name) for name in (*self._SETTINGS, "num_steps")}

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check a state dict as :meth:`load_state_dict` does, without loading the dict.

        Args:
            state_dict: result of :meth:`state_dict`.

        Raises:
            ValueError: a setting differs from this object's, and both
                ``use_checkpoint_opt_param_scheduler`` and ``override_opt_param_scheduler`` are
                False.
        """
        if self.override_opt_param_scheduler or self.use_checkpoint_opt_param_scheduler:
            return
        for name in self._SETTINGS:
            saved = state_dict.get(name, getattr(self, name))
            if saved != getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: the checkpoint has {saved!r}; set "
                    "use_checkpoint_opt_param_scheduler=True to take the checkpoint's value, or "
                    "override_opt_param_scheduler=True to keep this value"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``num_steps`` and settings, and set ``lr`` and ``weight_decay`` of the groups.

        Without ``override_opt_param_scheduler``, a group whose limit equals this object's limit
        gets the loaded limit. Groups with other limits keep their limits. A warning names the
        settings that change and the groups that keep theirs. A second load of one state dict has no
        effect.

        Args:
            state_dict: result of :meth:`state_dict`.

        Raises:
            ValueError: a setting differs from this object's, and both
                ``use_checkpoint_opt_param_scheduler`` and ``override_opt_param_scheduler`` are
                False.
        """
        self.check_state_dict(state_dict)
        self.num_steps = state_dict["num_steps"]
        if self.override_opt_param_scheduler:
            self._restore_limits()
        else:
            self._take_settings(state_dict)
        self.step(0)

    def _take_settings(self, state_dict: dict[str, Any]) -> None:
        before = {name: getattr(self, name) for name in self._SETTINGS}
        changed = {
            name: state_dict[name]
            for name, value in before.items()
            if state_dict.get(name, value) != value
        }
        for name, value in changed.items():
            setattr(self, name, value)
        kept: list[str] = []
        for index, group in enumerate(self.optimizer.param_groups):
            for name in self._LIMITS:
                if name not in group or group[name] == getattr(self, name):
                    continue
                if name in changed and group[name] == before[name]:
                    group[name] = changed[name]
                elif name in changed:
                    kept.append(f"{name}={group[name]!r} of param group {index}")
        if changed:
            words = [f"{name}={value!r} ({before[name]!r} here)" for name, value in changed.items()]
            own = f", and these groups keep limits of their own: {', '.join(kept)}" if kept else ""
            warn(
                f"the checkpoint's schedule is loaded: {', '.join(words)}{own}; set "
                "override_opt_param_scheduler=True to keep this scheduler's settings"
            )

    # -- loads of the optimizer ---------------------------------------------------------------

    def _limits_of_groups(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        return [{name: group[name] for name in self._LIMITS if name in group} for group in groups]

    def _restore_limits(self) -> None:
        """Reset the limits of each group to their values at the construction of this scheduler."""
        for group, limits in zip(self.optimizer.param_groups, self._limits, strict=False):
            for name in self._LIMITS:
                group.pop(name, None)
            group.update(limits)

    def _after_load(self, _: Any) -> None:
        """Restore the groups' limits after a load of the optimizer, if
        ``override_opt_param_scheduler`` is True. Otherwise warn about loaded limits that differ."""
        if self.override_opt_param_scheduler:
            self._restore_limits()
            self.step(0)
            return
        differ = [
            f"{name}={limits.get(name)!r} of param group {index} ({own.get(name)!r} here)"
            for index, (limits, own) in enumerate(
                zip(self._limits_of_groups(), self._limits, strict=False)
            )
            for name in self._LIMITS
            if limits.get(name) not in (own.get(name), getattr(self, name))
        ]
        if differ:
            warn(
                f"the loaded param groups change limits of the schedule: {differ[0]}"
                f"{f' and {len(differ) - 1} more' if len(differ) > 1 else ''}; set "
                "override_opt_param_scheduler=True to keep the limits of this run"
            )
