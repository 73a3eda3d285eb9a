"""The first hour on a GPU: the parts of the check in the order of what they are worth, each with
its share of the time, and what becomes of each prediction.

A prediction is refuted by a number, not by a feeling: a time by 1.3 times the predicted one, a rate
of a model by its part of 1.3, a count by any other, and what docs/benchmarks.md aims at by less.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.ours import OURS
from lab.gpu.opponents import SEQUENCE
from lab.gpu.parts import Outcome
from support.launch import ROOT

ORDER: Mapping[str, int] = {
    "door": 120,
    "backend": 480,
    "bits": 300,
    "ranks": 60,
    "rates": 60,
    "kernels": 300,
    "syncs": 120,
    "verdict": 240,
    "many": 240,
    "places": 480,
    "steps": 300,
    "hybrid": 240,
    "saves": 120,
    "tests-conformance": 300,
    "tests-marked": 240,
}
"""Seconds of each part; together an hour."""
SLACK = 1.3
"""How many times a predicted time refutes it."""
_FILE = ROOT / "docs" / "gpu.json"
_KERNELS = {"triton: update": ("adam", "bfloat16 bfloat16 - float32 float32 -")}
"""Rows of the part ``kernels``, and what is predicted for them."""


@dataclass(frozen=True)
class Prediction:
    """Attributes:
    row, column: of a part's table.
    value: predicted. relation: of what is measured to it: at most or at least so much, or equal.
    refuted_by: what would refute it.
    """

    part: str
    row: str
    column: str
    value: float
    relation: str
    refuted_by: float

    def holds(self, measured: float) -> bool:
        """Whether a measured number does not refute it."""
        if self.relation == "at most":
            return measured <= self.refuted_by
        if self.relation == "at least":
            return measured >= self.refuted_by
        return measured == self.value


@dataclass(frozen=True)
class Verdict:
    """A prediction beside what was measured; None if that was not."""

    prediction: Prediction
    measured: float | None

    @property
    def said(self) -> str:
        """Whether it holds, in a word or two."""
        if self.measured is None:
            return "not measured"
        return "holds" if self.prediction.holds(self.measured) else "REFUTED"


def card_of(device: str, cards: list[str]) -> str | None:
    """Return the card whose model number (``H100``, ``4090``) is a word of the device's name."""
    words = device.upper().replace("-", " ").split()

    def number(card: str) -> str:
        return next(word for word in card.split() if any(map(str.isdigit, word)))

    return next((card for card in cards if number(card) in words), None)


def predictions(outcomes: Mapping[str, Outcome], device: str, params: int) -> list[Prediction]:
    """What is predicted for the rows of the parts; a row that is there is judged by its column."""
    found = list(_times(device, params))
    for part, starts, column, value, relation, limit in (
        ("door", "", "works", 1.0, "equal", 1.0),
        ("bits", "", "same", 1.0, "equal", 1.0),
        ("ranks", "", "same", 1.0, "equal", 1.0),
        ("syncs", "", "count", 0.0, "equal", 0.0),
        ("places", "", "of_model", 1.0, "at least", 1.0 / SLACK),
        ("hybrid", "", "peak_over_formula", 1.0, "at most", SLACK),
        ("kernels", "triton: measure", "of_limit", 0.85, "at least", 0.85),
        ("steps", OURS, "of_limit", 0.9, "at least", 0.9),
        ("steps", SEQUENCE, "times_ours", 1.7, "at least", 1.7),  # 52 bytes a parameter to 30
        ("saves", "entries", "count", 0.0, "equal", 0.0),
        ("tests-conformance", "", "failed", 0.0, "equal", 0.0),
        ("tests-marked", "", "failed", 0.0, "equal", 0.0),
    ):
        for row, columns in _rows(outcomes.get(part)):
            if row.startswith(starts) and (column in columns or column == "failed"):
                found.append(Prediction(part, row, column, value, relation, limit))
    return found


def _rows(outcome: Outcome | None) -> Iterator[tuple[str, Mapping[str, float]]]:
    if outcome is not None and outcome.section is not None:
        yield from outcome.section["rows"].items()


def _times(device: str, params: int) -> Iterator[Prediction]:
    """Milliseconds that the page predicts for a card, for as many elements."""
    table = json.loads(_FILE.read_text())["tables"]["predicted"]
    cards = [head.removesuffix(", ms") for head in table["heads"]]
    card = card_of(device, cards[2:])
    rows = {tuple(row[:2]): row for row in table["rows"]}
    for row, key in _KERNELS.items():
        if card is not None and key in rows:
            cell = rows[key][cards.index(card)]
            value = float(cell.partition(",")[0]) * params / 1e9
            yield Prediction("kernels", row, "ms", value, "at most", SLACK * value)


def verdicts(outcomes: Mapping[str, Outcome], device: str, params: int) -> list[Verdict]:
    """Every prediction, and what was found."""
    found = []
    for each in predictions(outcomes, device, params):
        rows = dict(_rows(outcomes.get(each.part)))
        default = 0.0 if each.column == "failed" and each.row in rows else None
        found.append(Verdict(each, rows.get(each.row, {}).get(each.column, default)))
    return found
