"""A rolling rule that skips steps with a spike of the gradient norm or the loss.

A value is a spike if it is above ``median + sigma_factor * spread`` of the last steps (the window).
The spread is 1.4826 times the median distance from the median. For a normal distribution this
spread equals the standard deviation. Mean and standard deviation are not used, because one spike
changes them so much that a second spike would not be found. Median and spread change only if half
of the window are spikes. The spread is at least 1/128 of the median, so that a window of equal
values does not skip the next step.

Every finite value enters the window, also the value of a skipped step. So a lasting change is
skipped for at most half a window. Then the changed value is the median, and steps are taken again.

If an accelerator forms the verdict, the window is in accelerator memory, so the host does not wait.
Sorting and single IEEE operations in FP64 give the same bits on every device.
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
"""Smallest spread, as a fraction of the median. Equal norms have no spread, and then every larger
norm would be a spike."""
_ENTRY, _WINDOW = "skip_step", "window"


class SkipRule(Observer):
    """The gradient norms and losses of the last steps of a stack, which judge the next step.

    The rule is on if ``skip_step_sigma_factor`` is finite when the stack is built. The factor is
    read again at each step. ``skip_step_rolling_interval_length`` is read once.

    Attributes:
        length: number of steps in the window.
        reported: loss of the coming step, one element; None if no loss was reported.
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
        """True if this rule may skip steps."""
        return math.isfinite(self._config.skip_step_sigma_factor)

    @in_own_modes
    def report_loss(self, loss: Tensor | float | None, group: ProcessGroup | None = None) -> None:
        """Average the loss of the coming step over the ranks, and keep it for :meth:`judge`.
        Collective in a job of several ranks.

        Args:
            loss: loss of this rank's whole batch, not scaled: a number or a tensor of one element;
                None if this rank has no loss.
            group: the ranks that step together; by default all ranks of the job.

        Raises:
            ValueError: the loss is not one real number.
        """
        given: object = loss  # A caller without type checks may pass anything.
        if isinstance(loss, Tensor):
            is_dense = loss.layout == torch.strided and not loss.is_meta
            is_number = is_dense and not loss.is_complex() and loss.numel() == 1
            shown = f"{loss.dtype} {tuple(loss.shape)}"
        else:
            is_number = given is None or (isinstance(given, Real) and not isinstance(given, bool))
            shown = repr(given)
        if not is_number:
            raise ValueError(
                f"loss={shown}: the loss is not one real number; give the mean over the batch "
                "(loss.mean()), or None if this rank has no loss"
            )
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
        # A reported loss counts for one step only, so forget the loss.
        reported, self.reported = self.reported, None
        if not self.is_on:
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
        count = (~self._window.isnan()).sum(dim=1, keepdim=True)
        middle = _median(self._window, count)
        spread = _median((self._window - middle).abs(), count) * _TO_SIGMA
        spread = torch.maximum(spread, middle.abs() * _LEAST_SPREAD)
        limits = middle + spread * float(self._config.skip_step_sigma_factor)
        enough = count >= max(2, self.length // 2)
        # Element 0 is the largest allowed norm, element 1 the largest allowed loss.
        limits = torch.where(enough, limits, math.inf).reshape(2)
        values = torch.cat([norm.reshape(1), self._loss])
        return (values > limits).any(), torch.cat([limits[:1], self._loss, limits[1:]])

    def take(self, norm: Tensor) -> None:
        usable = norm.isfinite().reshape(1)
        loss = torch.where(self._loss.isfinite(), self._loss, math.nan)
        values = torch.stack([norm.reshape(1), loss])
        where = self._next.expand(2, 1)
        kept = self._window.gather(1, where)
        self._window.scatter_(1, where, torch.where(usable, values, kept))
        self._next.copy_((self._next + usable) % self.length)

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
        """Return the largest allowed norm and loss of the last step, and the loss itself if one was
        reported."""
        return {**self.stack.counts.last_verdict().limits}

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the window, oldest step first: FP64, shape (2, steps), with the norms in row 0 and
        the losses in row 1. A loss that was not reported is nan. Return {} if the rule is off."""
        if not self.is_on:
            return {}
        window = self._window.cpu().roll(-int(self._next), dims=1)
        return {_ENTRY: {_WINDOW: window[:, ~window[0].isnan()]}}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        saved = state_dict.get(_ENTRY)
        window = saved.get(_WINDOW) if isinstance(saved, Mapping) else None
        is_window = (
            isinstance(window, Tensor)
            and window.layout == torch.strided
            and not window.is_meta
            and window.is_floating_point()
            and window.dim() == 2
            and len(window) == 2
            and not bool(window.isinf().any())
        )
        if saved is not None and not is_window:
            raise ValueError(
                f"skip_step={saved!r}: the saved window is not a dense finite tensor of 2 rows "
                "(norms and losses); remove the entry 'skip_step' from the state dict to start "
                "with an empty window"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the window of a state dict. If the saved window is longer than :attr:`length`, only
        its newest steps are loaded. A state dict without a window empties the present window."""
        self._window.fill_(math.nan)
        self._next.zero_()
        if (saved := state_dict.get(_ENTRY)) is not None:
            kept = saved[_WINDOW][:, -self.length :]
            self._window[:, : kept.shape[1]].copy_(kept)
            self._next.fill_(kept.shape[1] % self.length)


def _median(rows: Tensor, count: Tensor) -> Tensor:
    """Return the median of the numbers in each row, FP64, shape (rows, 1).

    Args:
        rows: FP64, shape (rows, length); nan stands for no number.
        count: number of numbers in each row, shape (rows, 1).
    """
    ordered = rows.sort(dim=1).values  # sort() puts nan last.
    low = ordered.gather(1, ((count - 1) // 2).clamp(min=0))
    high = ordered.gather(1, (count // 2).clamp(max=rows.shape[1] - 1))
    return (low + high) * 0.5
