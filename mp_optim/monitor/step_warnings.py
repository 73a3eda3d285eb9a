"""Warns of skipped steps, and of steps without any gradient. In a normal step this costs one
comparison and never waits for the device."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from mp_optim.core.names import names_in_words
from mp_optim.host.calls import warn, weak_method
from mp_optim.kernels.kernel_args import fp32
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.mixed_precision.clip_and_skip import DISAGREEMENT, DeviceVerdict, Verdict
from mp_optim.mixed_precision.observer import Observer
from mp_optim.mixed_precision.step import StepGrads

_log = logging.getLogger(__name__)


class StepWarnings(Observer):
    """Warnings about the steps of one stack.

    Attributes:
        skips: number of skipped steps since the last step that was taken, as far as the host knows.
    """

    def __init__(self, stack: MegatronOptimizer) -> None:
        super().__init__(stack)
        self.skips = 0
        self._warned_of_no_gradient = False

    def after_step(self, grads: StepGrads, verdict: Verdict | DeviceVerdict) -> None:
        """Warn of a skipped step as soon as the host knows the verdict. Warn once of a step without
        any gradient.

        After steps 1, 2, 4, 8 and so on, also warn of parameters of the model that have a gradient
        and are not in the optimizer.
        """
        stack = self._stack()
        assert stack is not None
        steps, params = stack.counts.steps, stack.model_params
        if not (self._warned_of_no_gradient or grads.has_any or stack.is_stub_optimizer):
            self._warned_of_no_gradient = True
            untrained = [] if params is None else params.untrained(stack.param_groups)
            count = sum(len(group["params"]) for group in stack.param_groups)
            unknown = (
                f"The model has {len(untrained)} trainable parameters that the optimizer does not "
                f"know: {names_in_words(untrained)}. "
                if untrained
                else ""
            )
            warn(
                f"none of the optimizer's {count} parameters has a gradient in this step, so "
                f"nothing is trained. {unknown}Call backward() before step(). If the model was "
                "replaced or wrapped after the optimizer was built (peft, deepcopy, fully_shard), "
                "build the optimizer last, from the model that is trained"
            )
        if isinstance(verdict, DeviceVerdict):
            verdict.when_known(weak_method(self._report))
        elif verdict.cause or self.skips:
            self._report(verdict)
        if params is not None and steps & (steps - 1) == 0:
            params.warn_of_untrained(stack, with_gradient=True)

    def _report(self, verdict: Verdict) -> None:
        if not verdict.cause:
            self.skips = 0
            return
        self.skips += 1
        stack = self._stack()
        # Ranks that disagree raise an error, so no warning is needed.
        if verdict.cause == DISAGREEMENT or stack is None:
            return
        scale = fp32(1.0 / verdict.scaling[0]) if verdict.scaling else None
        told, count = self._warn(stack, verdict, scale), stack.counts.skipped[verdict.cause]
        if count > _LOGGED_FIRST and count & (count - 1):
            return
        line = f"step {stack.counts.steps} was skipped: {verdict.reason}"
        line += f" ({told})" if told not in line else ""
        line += "" if scale is None else f"; loss scale {scale:.10g}"
        health = stack.observers.get("health")
        largest = {} if health is None else health.norms_in(verdict, _LARGEST)
        if largest:
            norms = ", ".join(f"{name} {norm:g}" for name, norm in largest.items())
            line += f"; largest gradient norms: {norms}"
        is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        _log.log(logging.WARNING if is_first and not told else logging.INFO, line)

    def _warn(self, stack: MegatronOptimizer, verdict: Verdict, scale: float | None) -> str:
        """Warn of a skipped step, if it is the 1st, 10th, 100th and so on in a row.

        A single skip over a threshold is expected, and so is an overflow while a dynamic loss scale
        can still shrink; both cause no warning.

        Returns:
            The cause that the warning names; empty without a warning.
        """
        if self.skips != 10 ** (len(str(self.skips)) - 1):
            return ""
        times = "a step was" if self.skips == 1 else f"{self.skips} steps in a row were"
        if not verdict.found_inf:
            # A single skip is expected with a threshold, so it causes no warning.
            if self.skips == 1:
                return ""
            warn(f"{times} skipped: {verdict.reason}")
            return verdict.reason
        scaler = stack.grad_scaler
        if scaler is not None and scale is not None and scaler.may_shrink(scale):
            return ""
        named = [each for each in stack.named_gradients() if each[1].layout == torch.strided]
        finite = [torch.isfinite(grad).all() for _, grad in named]
        flags: list[bool] = []
        if finite:
            # Copy all flags to one device, so that the host waits only once.
            flags = torch.stack([flag.to(finite[0].device) for flag in finite]).tolist()
        names = (name for (name, _), good in zip(named, flags, strict=True) if not good)
        name = next(names, None)
        culprit = "" if name is None else f"the gradient of {name} holds an inf or nan"
        lost = "a gradient that is cleared by now, or is on another rank, held an inf or nan"
        warn(f"{times} skipped, and nothing was trained: {culprit or lost}")
        return culprit or verdict.reason


_LOGGED_FIRST = 3
"""The first 3 skipped steps of one cause are all logged. After these steps, only the 4th, 8th, 16th
and so on are logged."""
_LARGEST = 3
"""Number of gradient norms in the log line of a skipped step, if norms are kept."""
