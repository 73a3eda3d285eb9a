"""A rolling rule for steps to skip: gradient norm and loss are compared with those of the steps
before.

A value is a spike if it is above ``median + sigma_factor * spread`` of the window. The spread is
1.4826 times the median of the distances from the median: the standard deviation of a normal
distribution, but half of the window has to be spikes before they move it. (The first spike moves a
mean and a standard deviation, so that a second passes.) The spread is at least 1/128 of the median,
so that equal values give no reason to skip the next.

Every finite value enters the window, also that of a skipped step. So a lasting change is skipped
for at most half a window; then it is the median, and steps are taken again.

If the verdict is formed on an accelerator, window and rule are there, without a wait. Sorting and
single IEEE operations in FP64 give the same bits on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.core import local_tensor
from mp_optim.host.calls import in_own_modes
from mp_optim.kernels.sums import reduce_over
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.mixed_precision.observer import Observer

_TO_SIGMA = 1.4826
_LEAST_SPREAD = 2.0**-7
"""Smallest spread, as a share of the median."""
_ENTRY, _WINDOW = "skip_step", "window"


class SkipRule(Observer):
    """The window of the last steps of a stack, which judges the next one.

    The config decides at construction whether the rule is on, and the length of its window. The
    factor is read at each step.

    Attributes:
        reported: loss of the coming step, one element, if it was reported.
    """

    @in_own_modes
    def __init__(self, stack: MegatronOptimizer) -> None:
        super().__init__(stack)
        self._config = stack.config
        self.length = self._config.skip_step_rolling_interval_length
        self._window = torch.full((2, self.length), math.nan, dtype=torch.float64, device="cpu")
        self._next = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._loss = torch.full((1,), math.nan, dtype=torch.float64, device="cpu")
        self.reported: Tensor | None = None

    @property
    def is_on(self) -> bool:
        """True if steps may be skipped by this rule."""
        return math.isfinite(self._config.skip_step_sigma_factor)

    @in_own_modes
    def report_loss(self, loss: Tensor | float | None, group: ProcessGroup | None = None) -> None:
        """See :meth:`mp_optim.monitor.health.GradientHealth.report_loss`."""
        _check_loss(loss)
        if not self.is_on:
            return
        on = loss.device if isinstance(loss, Tensor) else self.stack.device
        known = 0.0 if loss is None else 1.0
        total = torch.full((2,), known, dtype=torch.float64, device=on)
        if isinstance(loss, Tensor):
            total[:1].copy_(local_tensor(loss.detach()).reshape(1))
        elif loss is not None:
            total[:1].fill_(loss)
        if dist.is_available() and dist.is_initialized():
            ranks = dist.group.WORLD if group is None else group
            assert ranks is not None
            reduce_over((ranks,), total, "averaging the loss")
        self.reported = total[:1] / total[1:]

    def begin_judging(self, device: torch.device) -> bool:
        reported, self.reported = self.reported, None  # the loss belongs to this step only
        if not math.isfinite(self._config.skip_step_sigma_factor):
            return False
        if self._window.device != device:
            self._window, self._next, self._loss = (
                tensor.to(device) for tensor in (self._window, self._next, self._loss)
            )
        if reported is None:
            self._loss.fill_(math.nan)
        else:
            self._loss.copy_(reported, non_blocking=True)
        return True

    def judge(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.cat([norm.reshape(1), self._loss])
        limits = self._limits()
        return (values > limits).any(), torch.cat([limits[:1], self._loss, limits[1:]])

    def take(self, norm: Tensor) -> None:
        usable = norm.isfinite().reshape(1)
        loss = torch.where(self._loss.isfinite(), self._loss, math.nan)
        values = torch.stack([norm.reshape(1), loss])
        where = self._next.expand(2, 1)
        kept = self._window.gather(1, where)
        self._window.scatter_(1, where, torch.where(usable, values, kept))
        self._next.copy_((self._next + usable) % self.length)

    def _limits(self) -> Tensor:
        """Return the limits of norm and loss, shape (2,)."""
        count = (~self._window.isnan()).sum(dim=1, keepdim=True)
        middle = _median(self._window, count)
        spread = _median((self._window - middle).abs(), count) * _TO_SIGMA
        spread = torch.maximum(spread, middle.abs() * _LEAST_SPREAD)
        limits = middle + spread * float(self._config.skip_step_sigma_factor)
        enough = count >= max(2, self.length // 2)
        return torch.where(enough, limits, math.inf).reshape(2)

    def explain(self, norm: float, numbers: Sequence[float]) -> tuple[str, dict[str, float]]:
        norm_limit, loss, loss_limit = numbers
        limits = {"skip_limit/grad_norm": norm_limit}
        if not math.isnan(loss):
            limits |= {"skip_limit/loss": loss_limit, "reported_loss": loss}
        factor = self._config.skip_step_sigma_factor
        for value_name, value, limit in (
            ("gradient norm", norm, norm_limit),
            ("loss", loss, loss_limit),
        ):
            if value > limit:
                rule = (
                    f"the median of the last {self.length} steps plus {factor:g} sigma "
                    f"(skip_step_sigma_factor={factor:g})"
                )
                return f"the {value_name} is {value:g}, over {limit:g}, {rule}", limits
        return "", limits

    def metrics(self) -> dict[str, float]:
        """Return the limits of the last step, and its loss if one was reported."""
        return {**self.stack.counts.settle().limits}

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the window: FP64, shape (2, steps), norms and losses (nan where none was
        reported), oldest first. Empty if the rule is off."""
        if not self.is_on:
            return {}
        window = self._window.cpu().roll(-int(self._next), dims=1)
        return {_ENTRY: {_WINDOW: window[:, ~window[0].isnan()]}}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        saved = state_dict.get(_ENTRY)
        window = saved.get(_WINDOW) if isinstance(saved, Mapping) else None
        if saved is not None and not _is_window(window):
            raise ValueError(
                f"skip_step: the state has {saved!r} instead of the norms and losses of a window, "
                "a dense finite tensor of 2 rows; remove it to start with an empty window"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a window, or the newest part of one that is longer than this; empty the window if
        none was saved."""
        self.check_state_dict(state_dict)
        self._window.fill_(math.nan)
        self._next.zero_()
        if (saved := state_dict.get(_ENTRY)) is not None:
            kept = saved[_WINDOW][:, -self.length :]
            self._window[:, : kept.shape[1]].copy_(kept)
            self._next.fill_(kept.shape[1] % self.length)


def _is_window(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_meta
        and value.is_floating_point()
        and value.dim() == 2
        and len(value) == 2
        and not bool(value.isinf().any())
    )


def _median(rows: Tensor, count: Tensor) -> Tensor:
    """Return the median of each row's ``count`` numbers, shape (rows, 1); the other entries are
    nan."""
    ordered = rows.sort(dim=1).values  # nan is sorted last
    low = ordered.gather(1, ((count - 1) // 2).clamp(min=0))
    high = ordered.gather(1, (count // 2).clamp(max=rows.shape[1] - 1))
    return (low + high) * 0.5


def _check_loss(loss: object) -> None:
    if isinstance(loss, Tensor):
        is_usable = loss.layout == torch.strided and not loss.is_meta and not loss.is_complex()
        is_usable, shown = is_usable and loss.numel() == 1, f"{loss.dtype} {tuple(loss.shape)}"
    else:
        is_usable = loss is None or (isinstance(loss, Real) and not isinstance(loss, bool))
        shown = repr(loss)
    if not is_usable:
        raise ValueError(
            f"loss={shown}: it is not one real number; give the mean over the batch "
            "(loss.mean()), or None if this rank has no loss"
        )
