"""One case from beginning to end."""

from __future__ import annotations

import tempfile
import traceback
from dataclasses import dataclass

from lab.layout_fuzz.alone import expected
from lab.layout_fuzz.case import Case, Layout
from lab.layout_fuzz.judging import faults
from lab.layout_fuzz.pool import Pool, WorldLostError


@dataclass(frozen=True)
class Verdict:
    """Faults of a case.

    Attributes:
        refused: True if torch does not build its model.
        among_threads: faults that occur with ranks as threads, and not as processes.
    """

    faults: tuple[str, ...] = ()
    refused: bool = False
    among_threads: tuple[str, ...] = ()


def attempt(pool: Pool, case: Case) -> Verdict:
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
    return case.with_(
        layouts=tuple(
            Layout("alone", (), layout.fraction, layout.mode, layout.place)
            if layout.kind == "alone"
            else layout
            for layout in case.layouts
        )
    )
