"""The hooks by which options observe the steps of a stack and the weights that the steps write.

The step calls all observers of a list and knows no observer by name. The observers are in
:mod:`mp_optim.monitor`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.core import StepPlan


class Observer:
    """Base class of the observers of a stack's steps. Its hooks do nothing.

    Args:
        stack: the :class:`~mp_optim.MegatronOptimizer` to observe.
    """

    def __init__(self, stack: Any) -> None:
        # The optimizer owns this object, so a strong reference would be a cycle.
        self._stack = weakref.ref(stack)

    @property
    def stack(self) -> Any:
        """The observed stack.

        Raises:
            ReferenceError: the stack was deleted.
        """
        if (stack := self._stack()) is None:
            raise ReferenceError(
                "the optimizer of this observer was deleted; keep a reference to the optimizer"
            )
        return stack

    def before_step(self) -> None:
        """Hook that is called after a step is decided, and before anything is written."""

    def after_step(self, grads: Any, verdict: Any) -> None:
        """Hook that is called after each step, also after a skipped one.

        Args:
            grads: the step's :class:`~mp_optim.mixed_precision.step.StepGrads`.
            verdict: the step's :class:`~mp_optim.mixed_precision.clip_and_skip.Verdict` or
                ``DeviceVerdict``.
        """

    @property
    def is_on(self) -> bool:
        """True if the config of the stack needs the hooks of this observer."""
        return True

    # -- steps to skip

    def begin_judging(self, device: torch.device) -> bool:
        """Prepare to decide about the coming step. Return False if this observer skips no steps.

        Args:
            device: the device on which the step is decided.
        """
        return False

    def judge(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Decide whether to skip a step. The decision is computed on the device of ``norm``.

        Args:
            norm: gradient norm of the step, FP64, shape ().

        Returns:
            Bool of shape (), True to skip the step; and FP64 numbers, 1-D, for :meth:`explain`.
        """
        raise NotImplementedError

    def explain(self, norm: float, numbers: Sequence[float]) -> tuple[str, dict[str, float]]:
        """Return the reason for a skip, and metrics of the judgement by name. The reason is empty
        if the step is taken.

        Args:
            norm: gradient norm of the step.
            numbers: the numbers that :meth:`judge` returned.
        """
        raise NotImplementedError

    def take(self, norm: Tensor) -> None:
        """Record the norm of a judged step for later steps.

        Args:
            norm: FP64, shape (); nan if the norm is not finite.
        """

    # -- metrics and saved state

    def metrics(self) -> dict[str, float]:
        """Return numbers about the last step, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of the stack's state dict that belong to this observer."""
        return {}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError if :meth:`load_state_dict` cannot load the state. The observer is not
        changed."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the entries of a stack's state dict that belong to this observer."""


class Observers(dict[str, Any]):
    """The observers of a stack by name, and the hooks that a step calls.

    Args:
        kinds: class of each observer by name, in the order of the calls.
        stack: the observed stack.

    Attributes:
        before_step: hooks to call before a step.
        after_step: hooks to call after a step.
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
    """Base class of the observers of one precision wrapper's weights. Its hooks do nothing."""

    def before_launch(self, plan: StepPlan, indices: list[int]) -> Sequence[Tensor | None]:
        """Return bitmaps in which kernels mark the elements that they change; empty for none.

        Args:
            plan: the slots that are stepped next.
            indices: indices of these slots in the wrapper's slot table.
        """
        return ()

    def after_launch(self) -> None:
        """Hook that is called after a step has written weights."""

    def weight_written(self, index: int) -> None:
        """Hook that is called after other code than a step wrote a weight.

        Args:
            index: index of the slot in the wrapper's slot table.
        """

    def state_exposed(self, index: int) -> None:
        """Hook that is called before a caller gets the main param or state of a slot, which the
        caller may write to.

        Args:
            index: index of the slot in the wrapper's slot table.
        """
