"""The hooks through which options watch the steps of a stack, and the weights that it writes.

The step calls a list of observers and knows none of them by name. :mod:`mp_optim.monitor` has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.core import StepPlan


class Observer:
    """Watches the steps of one stack. The hooks of this class do nothing.

    Args:
        stack: :class:`~mp_optim.MegatronOptimizer` whose steps are watched.
    """

    def __init__(self, stack: Any) -> None:
        self._stack = weakref.ref(stack)  # the optimizer owns this object

    @property
    def stack(self) -> Any:
        """The stack whose steps are watched.

        Raises:
            ReferenceError: it was deleted.
        """
        if (stack := self._stack()) is None:
            raise ReferenceError("the optimizer of this observer was deleted; keep the optimizer")
        return stack

    def before_step(self) -> None:
        """Watch a step that is decided, before anything is written."""

    def after_step(self, grads: Any, verdict: Any) -> None:
        """Watch a step that is complete, also one that was skipped.

        Args:
            grads: the step's :class:`~mp_optim.mixed_precision.step.StepGrads`.
            verdict: :class:`~mp_optim.mixed_precision.clip_and_skip.Verdict` or ``DeviceVerdict``.
        """

    @property
    def is_on(self) -> bool:
        """True if the hooks have work to do under the config with which the stack is built."""
        return True

    # -- steps to skip

    def begin_judging(self, device: torch.device) -> bool:
        """Prepare to judge the coming step on ``device``, where it is decided. Return False if this
        observer skips nothing."""
        return False

    def judge(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Judge a step on the device of its norm.

        Args:
            norm: FP64, shape ().

        Returns:
            Bool of shape (), True to skip the step; FP64 numbers, 1-D, for :meth:`explain`.
        """
        raise NotImplementedError

    def explain(self, norm: float, numbers: Sequence[float]) -> tuple[str, dict[str, float]]:
        """Return why a step is skipped, empty if it is taken; and metrics of the judgement.

        Args:
            norm: of the step.
            numbers: as :meth:`judge` returned them.
        """
        raise NotImplementedError

    def take(self, norm: Tensor) -> None:
        """Remember the norm of a judged step, FP64 of shape (); nan if it is not finite."""

    # -- what is shown and saved

    def metrics(self) -> dict[str, float]:
        """Return numbers about the last step, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of the stack's state dict that belong to this observer."""
        return {}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError unless :meth:`load_state_dict` can load this; write nothing."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this observer's entries of a stack's state dict."""


class Observers(dict[str, Any]):
    """The observers of a stack by name, and the hooks of a step that they have.

    Args:
        kinds: class of each observer by name, in the order of their calls.
        stack: the stack that they watch.

    Attributes:
        before_step: hooks to call before a step.
        after_step: hooks to call after it.
        judges: observers that may skip a step.
    """

    def __init__(self, kinds: Mapping[str, type[Observer]], stack: Any) -> None:
        super().__init__({name: kind(stack) for name, kind in kinds.items()})
        self.before_step = self._overriding("before_step")
        self.after_step = self._overriding("after_step")
        self.judges: list[Observer] = [hook.__self__ for hook in self._overriding("judge")]

    def _overriding(self, name: str) -> list[Any]:
        plain = getattr(Observer, name)
        return [
            getattr(each, name)
            for each in self.values()
            if getattr(type(each), name) is not plain and each.is_on
        ]

    def judge_on(self, device: torch.device) -> Observer | None:
        """Return the observer that judges the coming step on ``device``, or None."""
        return next((each for each in self.judges if each.begin_judging(device)), None)


class WeightObserver:
    """Watches the weights of one precision wrapper. The hooks of this class do nothing."""

    def before_launch(self, plan: StepPlan, indices: list[int]) -> Sequence[Tensor | None]:
        """Return bitmaps in which kernels mark the elements that they change; empty for none.

        Args:
            plan: of the slots that are going to be stepped.
            indices: of these slots in the wrapper's slot table.
        """
        return ()

    def after_launch(self) -> None:
        """Watch weights that a step has written."""

    def weight_written(self, index: int) -> None:
        """Watch a weight that code other than a step wrote."""

    def state_exposed(self, index: int) -> None:
        """Watch a slot whose main param or state a caller got, who may write to it."""
