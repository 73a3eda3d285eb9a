"""Says which steps were skipped, and where steps cannot have trained anything: gradients that were
not scaled, that are not there, or that are skipped again and again; and where gradients were
clipped already. A healthy step pays a comparison or two for it, and never waits for the device."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import ParamGroups
from mp_optim.core.names import ModelParams
from mp_optim.core.state_dict import names_in_words
from mp_optim.host.calls import warn
from mp_optim.kernels.kernel_args import fp32
from mp_optim.mixed_precision.clip_and_skip import StepCounts, Verdict
from mp_optim.mixed_precision.grad_norm import NormKey
from mp_optim.mixed_precision.grad_scaler import MegatronGradScaler
from mp_optim.mixed_precision.health import GradientHealth
from mp_optim.process_groups.missing_ranks import all_gather

_IN_A_ROW = 5
_ALIKE = 1e-3
"""Largest relative difference between the norms of FP32 gradients that were clipped to one norm."""
_IN_A_ROW_OF_BF16 = 10
_ALIKE_OF_BF16 = 2.0**-7
"""The same for bfloat16: torch rounds norms, their root and the clip coefficient to 8 bits each."""


_log = logging.getLogger(__name__)


class Watched(Protocol):
    """What is asked of the optimizer that is watched."""

    param_groups: ParamGroups
    config: OptimizerConfig
    counts: StepCounts
    grad_scaler: MegatronGradScaler | None
    health: GradientHealth

    @property
    def chained_optimizers(self) -> list[Any]: ...
    @property
    def is_stub_optimizer(self) -> bool: ...
    def named_gradients(self) -> Iterator[tuple[str, Tensor]]: ...
    def norm_ranks(self) -> list[ProcessGroup]: ...
    def own_gradient(self) -> tuple[object, int] | None: ...


class StandstillWatch:
    """What one stack's steps have come to so far.

    Attributes:
        params: the model's, if the optimizer was built for a whole model.
        skips: skipped steps in a row, as far as the host knows.
    """

    def __init__(self) -> None:
        self.params: ModelParams | None = None
        self.skips = 0
        self._warned_of_no_gradient = False
        self._norms: list[float] = []  # of the last steps
        self._warned_of_clipping = False
        self._ranks_scaled = False
        self._stepped: tuple[weakref.ref[object], int] | None = None

    def check_scaled(self, stack: Watched) -> None:
        """Raise if there is a loss scale, and the caller did not ask for it since the last step.

        Where ranks share the model, one that got scaled gradients from another need not have asked:
        they compare notes at the first step, and are believed afterwards. One whose backward did
        not come to the model has no gradients of its own to judge by.

        Raises:
            RuntimeError: on all ranks alike; nothing was stepped.
        """
        scaler = stack.grad_scaler
        if scaler is None:
            return
        # the ranks that agree on one norm, if there are several
        ranks = next((ranks for ranks in stack.norm_ranks() if ranks.size() > 1), None)
        if ranks is not None and self._ranks_scaled:
            return
        own = stack.own_gradient()
        is_new = own is not None and not self._is_stepped(*own)
        if (
            _is_suspect(ranks, scaler.was_asked, is_new)
            and (scale := float(scaler.present_scale)) != 1.0
        ):
            raise RuntimeError(
                f"the loss scale is {scale:g}, and the gradients of this step were not scaled by "
                "it: nobody asked for it since the last step, so dividing by it would leave next "
                "to nothing. Call optimizer.scale_loss(loss).backward(). Where a framework calls "
                "backward itself (HF Trainer, Lightning, accelerate), set loss_scale=1.0 in "
                "OptimizerConfig, or use bf16; with torch.amp.GradScaler leave fp16 off. If they "
                "were scaled otherwise, take the scale from optimizer.get_loss_scale() once a "
                "step, which says so"
            )
        self._ranks_scaled = ranks is not None
        self._stepped = None if own is None else (weakref.ref(own[0]), own[1])

    def _is_stepped(self, holder: object, writes: int) -> bool:
        """Whether it is what the last step was taken with: then it is scaled as it was, and is
        taken again."""
        before = self._stepped
        return before is not None and before[0]() is holder and before[1] == writes

    def see_gradients(self, stack: Watched, present: bool) -> None:
        """Warn, once, of a step for which no parameter has a gradient."""
        if present or self._warned_of_no_gradient or stack.is_stub_optimizer:
            return
        self._warned_of_no_gradient = True
        untrained = [] if self.params is None else self.params.untrained(stack.param_groups)
        count = sum(len(group["params"]) for group in stack.param_groups)
        unknown = (
            f"The model has {len(untrained)} trainable parameters that the optimizer does not "
            f"know: {names_in_words(untrained)}. "
            if untrained
            else ""
        )
        warn(
            f"none of the optimizer's {count} parameters has a gradient in this step, so nothing "
            f"is trained. {unknown}Was backward() called? Was the model replaced or wrapped after "
            "the optimizer was built (peft, deepcopy, fully_shard)? Build the optimizer last, from "
            "the model that is trained"
        )

    def see_untrained(self, stack: Watched) -> None:
        """Warn, once, of parameters of the model that have a gradient and that the optimizer does
        not have. Looked for after steps 1, 2, 4, 8 and so on."""
        steps = stack.counts.steps
        if self.params is not None and steps & (steps - 1) == 0:
            self.params.warn_of_untrained(stack, with_gradient=True)

    def judge(self, stack: Watched, verdict: Verdict) -> None:
        """Judge a step by its verdict, as the host knows it."""
        if not verdict.skip:
            self.skips = 0
            self._see_norm(verdict.grad_norm, stack.config.clip_grad)
            return
        self.skips += 1
        if verdict.disagrees:  # which is an error
            return
        scales = _scales(stack.grad_scaler, verdict)
        told = self._warn(stack, verdict, scales)
        _log_skip(stack, verdict, scales, told)

    def _see_norm(self, norm: float | None, limit: float) -> None:
        """Warn, once, if some steps in a row came with one norm, and would be clipped again.

        Only clipped gradients have one norm again and again. Constant ones, of a test or a
        benchmark, have it to the last bit. Clipped gradients in bfloat16 have norms next to the
        limit.

        Args:
            norm: of a step, before it was clipped.
            limit: ``clip_grad`` of the config.
        """
        over = 1.0 + _ALIKE_OF_BF16
        if self._warned_of_clipping or norm is None or not 0.0 < norm <= limit * over:
            self._norms.clear()
            return
        self._norms = [*self._norms[1 - _IN_A_ROW_OF_BF16 :], norm]
        last, count = self._norms[-_IN_A_ROW:], len(self._norms)
        is_one = count >= _IN_A_ROW and max(last) <= min(min(last), limit) * (1.0 + _ALIKE)
        is_at_limit = count == _IN_A_ROW_OF_BF16 and min(self._norms) >= limit * (2.0 - over)
        if not (is_one or is_at_limit) or min(last) == max(last):
            return
        self._warned_of_clipping = True
        warn(
            f"the gradient norm was {norm:.4g} in {count} steps in a row, so something clips "
            f"gradients before the optimizer clips them to {limit:g}. Clip in one place: here, and "
            "no max_grad_norm, gradient_clip_val or clip_grad_norm_ there (0 for the HF Trainer); "
            "or there, and clip_grad=0 in OptimizerConfig (max_grad_norm=None)"
        )

    def _warn(self, stack: Watched, verdict: Verdict, scales: Sequence[float]) -> str:
        """Warn of the 1st, 10th, 100th ... skipped one in a row;
        of one that a dynamic loss scale is there for, or a threshold, only when it should not have
        come to that. Returns what was said of the cause; empty if nothing was."""
        if self.skips != 10 ** (len(str(self.skips)) - 1):
            return ""
        times = "a step was" if self.skips == 1 else f"{self.skips} steps in a row were"
        if not verdict.found_inf:
            if self.skips == 1:  # one is what the threshold is for
                return ""
            warn(f"{times} skipped: {verdict.reason}")
            return verdict.reason
        scaler = stack.grad_scaler
        if scaler is not None and scaler.may_shrink(scales[-1]):
            return ""
        culprit = _culprit(stack)
        lost = "a gradient held an inf or nan (it is cleared by now, or on another rank)"
        warn(f"{times} skipped, and nothing was trained: {culprit or lost}")
        return culprit or verdict.reason


def _scales(scaler: MegatronGradScaler | None, verdict: Verdict) -> list[float]:
    """The loss scale before a step and, if that can be told, after it; empty if there is none."""
    if scaler is None or not verdict.scaling:
        return []
    inverse, *trackers = verdict.scaling
    before = fp32(1.0 / inverse)
    after = scaler.scale_after(before, trackers, verdict.found_inf)
    return [before] if after is None else [before, after]


_SAID_FIRST = 3
"""Skipped steps of one cause that are all logged; after them the 4th, 8th, 16th ..."""


def _log_skip(stack: Watched, verdict: Verdict, scales: Sequence[float], told: str) -> None:
    """Log a skipped step, if it is due, on the first of the ranks that skip it.

    Args:
        told: what a warning has just said of the cause. The line is one for the record then.
    """
    count = stack.counts.skipped[verdict.cause]
    is_due = count <= _SAID_FIRST or count & (count - 1) == 0
    if not is_due or not _is_first(stack):
        return
    line = f"step {stack.counts.steps} was skipped: {verdict.reason}"
    if told not in line:
        line += f" ({told})"
    if scales:
        line += "; loss scale " + " -> ".join(f"{scale:.10g}" for scale in scales)
    if largest := stack.health.norms_in(verdict, _SAID_FIRST):
        norms = ", ".join(f"{name} {norm:g}" for name, norm in largest.items())
        line += f"; largest gradient norms: {norms}"
    if count > _SAID_FIRST + 1:
        line += f"; {count // 2 - 1} skipped before it for the same cause were not said"
    _log.log(logging.INFO if told else logging.WARNING, line)


def _is_first(stack: Watched) -> bool:
    """Whether no rank with a lower number is known to have the same verdict."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    alike = [ranks for part in stack.chained_optimizers for ranks in _ranks_alike(part)]
    return not alike or min(set.intersection(*alike)) == dist.get_rank()


def _ranks_alike(part: Any) -> Iterator[set[int]]:
    """Of each kind of a part's parameters, the ranks that have its sums of squares in common."""
    keys: list[NormKey] = list(map(part.norm_key, part.slots()))
    for shard_groups in dict.fromkeys(key.shard_groups for key in keys):
        ranks = {dist.get_rank()}
        for group in (*shard_groups, *part.norm_ranks()):
            ranks.update(dist.get_process_group_ranks(group))
        yield ranks


def _culprit(stack: Watched) -> str:
    """Which gradient is not finite now, if one is; waits for the device, once."""
    named = [(name, grad) for name, grad in stack.named_gradients() if grad.layout == torch.strided]
    finite = [torch.isfinite(grad).all() for _, grad in named]
    if not finite:
        return ""
    home = finite[0].device
    of_each = torch.stack([flag.to(home) for flag in finite]).tolist()
    culprits = (name for (name, _), good in zip(named, of_each, strict=True) if not good)
    name = next(culprits, "")
    return f"the gradient of {name} holds an inf or nan" if name else ""


def _is_suspect(ranks: ProcessGroup | None, was_asked: bool, is_new: bool) -> bool:
    """Whether there are new gradients, and no rank asked for the loss scale. Collective."""
    if ranks is None:
        return is_new and not was_asked
    notes = all_gather(ranks, "comparing whether gradients were scaled", (was_asked, is_new))
    asked, new = zip(*notes, strict=True)
    return any(new) and not any(asked)
