"""One case from beginning to end."""

from __future__ import annotations

import tempfile
import traceback
from dataclasses import dataclass

from layout_fuzz.alone import expected
from layout_fuzz.case import Case, Layout
from layout_fuzz.judging import faults
from layout_fuzz.pool import Pool, WorldLostError

__all__ = ["Verdict", "attempt"]


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a case, in words; or that torch does not build its model."""

    faults: tuple[str, ...] = ()
    refused: bool = False


def attempt(pool: Pool, case: Case) -> Verdict:
    """Run a case and hold it against one process. A rank that hangs or dies is a fault like any other."""
    try:
        wanted = expected(case.with_(disagreement=None))
    except Exception:
        return Verdict((f"one process: {traceback.format_exc(limit=-4)}",))
    with tempfile.TemporaryDirectory() as folder:
        for phase, layout in enumerate(case.layouts):
            try:
                outcomes = pool.run(_seated(case), phase, folder)
            except WorldLostError as error:
                return Verdict((f"phase {phase}: {error}",))
            if all(outcome.error and outcome.stage == "model" for outcome in outcomes):
                return Verdict(refused=True)
            if wrong := faults(case, wanted, phase, outcomes):
                return Verdict(tuple(f"phase {phase} ({layout.kind}): {text}" for text in wrong))
    return Verdict()


def _seated(case: Case) -> Case:
    """A layout of one process is a world of one rank."""
    return case.with_(layouts=tuple(Layout("alone", (), layout.fraction, layout.mode) if layout.kind == "alone"
                                    else layout for layout in case.layouts))
