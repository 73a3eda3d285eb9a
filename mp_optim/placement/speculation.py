"""Whether it pays to step before the verdict: a rule over how the last verdicts turned out.

A speculated step is right if the verdict's multiplier is the predicted one (inverse loss scale,
clip coefficient 1) and nothing is skipped. A wrong one costs the time of a step that was hidden
under backward and one more copy of the state; a right one saves the whole arithmetic of ``step()``.
So speculating pays well below even odds, and stops only where it nearly always fails.
"""

from __future__ import annotations

from collections.abc import Collection

from mp_optim.process.caller_warnings import warn

__all__ = ["PAUSE_BELOW", "RESUME_AT", "WINDOW", "speculates_next", "warn_of_written"]

WINDOW = 8
"""Verdicts that are looked back on."""
PAUSE_BELOW = 2
"""Speculation pauses if fewer than this many of the last :data:`WINDOW` predictions were right."""
RESUME_AT = 4
"""It resumes as soon as this many were; while it pauses, verdicts are still compared with the
prediction."""


def speculates_next(speculates: bool, verdicts: Collection[bool]) -> bool:
    """Whether to speculate on the next step.

    Args:
        speculates: whether the last step was speculated on.
        verdicts: for each verdict so far, latest last, whether the prediction was right. Fewer than
            :data:`WINDOW` of them change nothing.
    """
    if len(verdicts) < WINDOW:
        return speculates
    right = sum(list(verdicts)[-WINDOW:])
    return right >= PAUSE_BELOW if speculates else right >= RESUME_AT


def warn_of_written(mode: str, times: int) -> None:
    """Say, the first time, that gradients were written after backward."""
    if times == 1:
        warn(
            f"offload_mode={mode!r}: gradients were written after backward, so what was begun on "
            "them is done again in "
            "step(), and nothing is gained. torch's clip_grad_norm_ writes all of them, also where "
            "it clips nothing: "
            "leave clipping to OptimizerConfig.clip_grad (HF Trainer: max_grad_norm=0, and a "
            "_get_grad_norm that does "
            "not call it; Lightning: gradient_clip_val=None)"
        )
