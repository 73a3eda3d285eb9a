"""A rolling rule for steps to skip: gradient norm and loss are compared with those of the steps
before.

A value is a spike if it is above ``median + sigma_factor * spread`` of the window, where the spread
is 1.4826 times the median of the distances from the median: the standard deviation of a normal
distribution, but half of the window has to be spikes before they move it. (A mean and a standard
deviation are moved by the first one, so that a second passes.) Below 1/128 of the median the spread
does not fall: equal values are no reason to skip the next.

Every finite value enters the window, that of a skipped step, too. So what is a lasting change and
no spike is skipped for at most half a window; then it is the median, and steps are taken again.

Where the verdict is formed on an accelerator, window and rule are there, and nobody waits. Sorting
and single IEEE operations in FP64 give the same bits on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mp_optim.config import OptimizerConfig
from mp_optim.host.calls import in_own_modes
from mp_optim.mixed_precision.grad_norm import MAIN_NORM

_TO_SIGMA = 1.4826
_LEAST_SPREAD = 2.0**-7
"""Of the median."""
_WINDOW = "window"
NUMBERS = 3
"""Of a judgement: see :class:`Judgement`."""


@dataclass(frozen=True)
class Judgement:
    """What the rule said of a step.

    Attributes:
        norm_limit: above it the gradient norm is a spike; inf until the window is half full.
        loss: of the step; nan if none was reported. loss_limit: the same for it.
        rule: in words, for messages.
    """

    norm_limit: float
    loss: float
    loss_limit: float
    rule: str

    def reason(self, norm: float) -> str:
        """Why a step of this gradient norm is skipped; empty if it is not."""
        for what, value, limit in (
            ("gradient norm", norm, self.norm_limit),
            ("loss", self.loss, self.loss_limit),
        ):
            if value > limit:
                return f"the {what} is {value:g}, over {limit:g}, {self.rule}"
        return ""

    def metrics(self) -> dict[str, float]:
        """By name; of the loss only where one was reported."""
        limits = {"skip_limit/grad_norm": self.norm_limit}
        if not math.isnan(self.loss):
            limits |= {"skip_limit/loss": self.loss_limit, "reported_loss": self.loss}
        return limits


class RollingRule:
    """The window of a stack, and what it says of the next step.

    Args:
        config: whose present values are read at each step, but for the window's length.

    Attributes:
        reported: the loss of the coming step, one element, if it was reported.
    """

    @in_own_modes
    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self.length = config.skip_step_rolling_interval_length
        self._window = torch.full((2, self.length), math.nan, dtype=torch.float64, device="cpu")
        self._next = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._loss = torch.full((1,), math.nan, dtype=torch.float64, device="cpu")
        self.reported: Tensor | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is ever skipped by it."""
        return math.isfinite(self._config.skip_step_sigma_factor)

    def begun(self, device: torch.device) -> RollingRule | None:
        """This, ready for a step that is decided on a device: the loss that was reported is there,
        for this step alone. None if the rule is off."""
        if not math.isfinite(self._config.skip_step_sigma_factor):
            self.reported = None
            return None
        self._begin(device)
        return self

    @in_own_modes
    def _begin(self, device: torch.device) -> None:
        if self._window.device != device:
            self._window, self._next, self._loss = (
                tensor.to(device) for tensor in (self._window, self._next, self._loss)
            )
        if self.reported is None:
            self._loss.fill_(math.nan)
        else:
            self._loss.copy_(self.reported, non_blocking=True)
        self.reported = None

    def judge(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """What the window says of a step, and leaves the window as it is.

        Args:
            norm: FP64, shape (), where the step is decided.

        Returns:
            Bool of shape (), whether it is a spike; FP64 of shape (NUMBERS,), the numbers of a
            :class:`Judgement`.
        """
        values = torch.cat([norm.reshape(1), self._loss])
        limits = self._limits()
        return (values > limits).any(), torch.cat([limits[:1], self._loss, limits[1:]])

    def take(self, norm: Tensor) -> None:
        """Put a step's values into the window, unless its norm is not finite."""
        usable = norm.isfinite().reshape(1)
        loss = torch.where(self._loss.isfinite(), self._loss, math.nan)
        values = torch.stack([norm.reshape(1), loss])
        where = self._next.expand(2, 1)
        kept = self._window.gather(1, where)
        self._window.scatter_(1, where, torch.where(usable, values, kept))
        self._next.copy_((self._next + usable) % self.length)

    def _limits(self) -> Tensor:
        """Of norm and loss, shape (2,)."""
        count = (~self._window.isnan()).sum(dim=1, keepdim=True)
        middle = _median(self._window, count)
        spread = _median((self._window - middle).abs(), count) * _TO_SIGMA
        spread = torch.maximum(spread, middle.abs() * _LEAST_SPREAD)
        limits = middle + spread * float(self._config.skip_step_sigma_factor)
        enough = count >= max(2, self.length // 2)
        return torch.where(enough, limits, math.inf).reshape(2)

    def judgement(self, numbers: list[float]) -> Judgement:
        """What :meth:`judge` returned, as the host has it."""
        factor = self._config.skip_step_sigma_factor
        rule = (
            f"the median of the last {self.length} steps plus {factor:g} sigma "
            f"(skip_step_sigma_factor={factor:g})"
        )
        norm_limit, loss, loss_limit = numbers
        return Judgement(norm_limit, loss, loss_limit, rule)

    def judge_on_host(self, norm: float) -> Judgement:
        """The same of a number; the step was begun on the host."""
        return self.judgement(self.judge(_number(norm))[1].tolist())

    def take_on_host(self, norms: Mapping[str, float]) -> None:
        """Put a step's norm into the window, if its verdict has one."""
        if MAIN_NORM in norms:
            self.take(_number(norms[MAIN_NORM]))

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The window: FP64, shape (2, steps), norms and losses (nan where none was reported),
        oldest first."""
        window = self._window.cpu().roll(-int(self._next), dims=1)
        return {_WINDOW: window[:, ~window[0].isnan()]}

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise ValueError unless :meth:`load_state_dict` can take this; write nothing. None is
        what a stack without the rule saved."""
        window = state_dict.get(_WINDOW) if isinstance(state_dict, Mapping) else None
        if state_dict is not None and not _is_window(window):
            raise ValueError(
                f"skip_step: it holds {state_dict!r}, not the norms and losses of a window as a "
                "dense tensor of 2 rows without infinities; leave it away to start with an empty "
                "window"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Take a window, or the newest part of one that is longer than this; None empties it."""
        self.check_state_dict(state_dict)
        self._window.fill_(math.nan)
        self._next.zero_()
        if state_dict is not None:
            kept = state_dict[_WINDOW][:, -self.length :]
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
    """Of each row's numbers, of which there are ``count``, shape (rows, 1); the others are nan."""
    ordered = rows.sort(dim=1).values  # nan is last
    low = ordered.gather(1, ((count - 1) // 2).clamp(min=0))
    high = ordered.gather(1, (count // 2).clamp(max=rows.shape[1] - 1))
    return (low + high) * 0.5


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")
