"""One case from beginning to end."""

from __future__ import annotations

import tempfile
import traceback
from dataclasses import dataclass

from lab.layout_fuzz.alone import expected
from lab.layout_fuzz.case import Case, Layout
from lab.layout_fuzz.judging import faults
from lab.layout_fuzz.pool import Pool, WorldLostError

__all__ = ["Verdict", "attempt"]


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a case, in words; or that torch does not build its model.

    Attributes:
        among_threads: what was wrong while ranks were threads, and is not with processes.
    """

    faults: tuple[str, ...] = ()
    refused: bool = False
    among_threads: tuple[str, ...] = ()


def attempt(pool: Pool, case: Case) -> Verdict:
    """Run a case and hold it against one process. A rank that hangs or dies is a fault like any
    other.

    Torch's DTensors are not made for threads (now and then one is given the size of another), so
    what goes wrong with them there has to go wrong among processes too.
    """
    verdict = _attempt(pool, case)
    dtensors = any(layout.kind in ("fsdp", "placed") for layout in case.layouts)
    if case.world == "processes" or not (verdict.faults and dtensors):
        return verdict
    again = _attempt(pool, case.with_(world="processes"))
    return again if again.faults else Verdict(among_threads=verdict.faults)


def _attempt(pool: Pool, case: Case) -> Verdict:
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
    return case.with_(
        layouts=tuple(
            Layout("alone", (), layout.fraction, layout.mode, layout.place)
            if layout.kind == "alone"
            else layout
            for layout in case.layouts
        )
    )
