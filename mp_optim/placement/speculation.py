"""Whether it pays to step before the verdict: a rule over how the last verdicts turned out.

A speculated step is right if the verdict's multiplier is the predicted one (inverse loss scale,
clip coefficient 1) and nothing is skipped. A wrong one costs the time of a step that was hidden
under backward and one more copy of the state; a right one saves the whole arithmetic of ``step()``.
So speculating pays well below even odds, and stops only where it nearly always fails.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mp_optim.process.caller_warnings import warn


@dataclass(frozen=True)
class SpeculationSettings:
    """When speculation pauses.

    Attributes:
        window: verdicts that are looked back on.
        pause_below: it pauses if fewer than this many of the last ``window`` predictions were
            right.
        resume_at: it resumes as soon as this many were; while it pauses, verdicts are still
            compared with the prediction.
    """

    window: int = 8
    pause_below: int = 2
    resume_at: int = 4

    def __post_init__(self) -> None:
        if (
            not 0 <= self.pause_below <= self.resume_at <= self.window
            or self.window < 1
        ):
            raise ValueError(
                f"{self}: 0 <= pause_below <= resume_at <= window is needed, and window >= 1"
            )


def speculates_next(
    speculates: bool,
    verdicts: Collection[bool],
    settings: SpeculationSettings = SpeculationSettings(),
) -> bool:
    """Whether to speculate on the next step.

    Args:
        speculates: whether the last step was speculated on.
        verdicts: for each verdict so far, latest last, whether the prediction was right. Fewer than
            the window change nothing.
    """
    if len(verdicts) < settings.window:
        return speculates
    right = sum(list(verdicts)[-settings.window :])
    return right >= (settings.pause_below if speculates else settings.resume_at)


def warn_of_changed(mode: str, is_first: bool) -> None:
    """Say, the first time, that gradients were changed after backward."""
    if is_first:
        warn(
            f"offload_mode={mode!r}: gradients were changed after backward, so what was begun on "
            "them is done again in step(). If torch's clip_grad_norm_ did it, leave clipping to "
            "OptimizerConfig.clip_grad (HF Trainer: max_grad_norm=0; Lightning: "
            "gradient_clip_val=None). metrics()['speculation_stale'] counts the buckets"
        )
