"""Tables of the figures that ``tools/gpu_check.py`` recorded, with a column for each card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
CARDS = {"H100": "gpu-h100.json", "H200": "gpu-h200.json"}
_ANSWERS = ": 1 is yes"
"""End of the title of a part whose values are 1 for yes and 0 for no."""
_STATED = {"door", "tests-marked", "tests-conformance"}
"""Parts that the page states in its first table."""
_LEFT_OUT = {
    "spread",
    "bytes_down",
    "bytes_up",
    "formula_bytes",
    "modelled_gparams",
    "streamed_fraction",
}
"""Columns that only the JSON files have: others follow from these or repeat them."""
_HEADS = {
    "gbs": "GB/s",
    "of_limit": "of limit",
    "times_ours": "times ours",
    "of_save": "of a save",
    "host_ms": "host ms",
    "times_one": "relative to large",
    "gparams": "Gparam/s",
    "of_model": "of model",
    "with_overflow": "with overflow",
    "verdict_on_host": "verdict on host",
    "bytes_per_host_param": "bus bytes a host param",
    "peak_bytes": "peak bytes",
    "peak_over_formula": "peak / formula",
}

Rows = dict[str, dict[str, dict[str, float]]]
"""By row and card, the values by column."""


def figures() -> Iterator[str]:
    """Yield the lines of all tables, each part under a heading."""
    records = {card: json.loads((FOLDER / name).read_text()) for card, name in CARDS.items()}
    parts = {card: record["parts"] for card, record in records.items()}
    newest = max(one["machine"]["date"] for part in parts.values() for one in part.values())
    yield from ("", f"Recorded on {newest}, except where another date is given.")
    for name in dict.fromkeys(name for part in parts.values() for name in part):
        if name in _STATED:
            continue
        found = {card: part[name] for card, part in parts.items() if name in part}
        sections = {card: one["section"] for card, one in found.items()}
        title = next(iter(sections.values()))["title"]
        dates = {card: one["machine"]["date"] for card, one in found.items()}
        older = [f"{card}: {date}" for card, date in dates.items() if date != newest]
        yield from ("", f"### {title.removesuffix(_ANSWERS)}")
        if older:
            yield from ("", f"{', '.join(older)}.")
        if title.endswith(_ANSWERS):
            yield from _answers(sections)
            continue
        for columns, rows in _by_columns(sections):
            yield from _table(columns, rows)
        for card, section in sections.items():
            if section["missing"]:
                yield from ("", f"Missing on the {card}: {'; '.join(section['missing'])}.")


def _answers(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows of a part of yes and no, as a list under their counts."""
    for card, section in sections.items():
        rows = {row: set(values.values()) == {1} for row, values in section["rows"].items()}
        failed = [row for row, holds in rows.items() if not holds]
        failures = f" Failed: {'; '.join(failed)}." if failed else ""
        yield from ("", f"{card}: {sum(rows.values())} of {len(rows)}.{failures}")
    rows = dict.fromkeys(row for section in sections.values() for row in section["rows"])
    yield from ("", *(f"- {row}" for row in rows))


def _by_columns(sections: Mapping[str, Any]) -> Iterator[tuple[list[str], Rows]]:
    """Yield the rows of a part that have the same columns, together."""
    found: dict[tuple[str, ...], Rows] = {}
    for card, section in sections.items():
        for row, values in section["rows"].items():
            columns = tuple(name for name in values if name not in _LEFT_OUT)
            found.setdefault(columns, {}).setdefault(row, {})[card] = values
    yield from ((list(columns), rows) for columns, rows in found.items())


def _table(columns: list[str], rows: Rows) -> Iterator[str]:
    cards = [card for card in CARDS if any(card in values for values in rows.values())]
    heads = [f"{card} {_HEADS.get(name, name)}" for card in cards for name in columns]
    heads = cards if len(columns) == 1 else heads
    yield from ("", f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|")
    for row, values in rows.items():
        cells = [_cell(values.get(card, {}).get(name)) for card in cards for name in columns]
        yield f"| {row} | {' | '.join(cells)} |"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3f}"
