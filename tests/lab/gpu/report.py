"""All parts as one readable document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def markdown(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """A table for each part, under what it was measured on; parts that failed with the cause."""
    lines: list[str] = []
    machine: Mapping[str, Any] = {}
    for name, outcome in outcomes.items():
        if outcome["machine"] != machine:
            machine = outcome["machine"]
            facts = [f"{key} {value}" for key, value in machine.items() if value]
            lines += [", ".join(facts) + ".", ""]
        if outcome["cause"]:
            lines += [f"### {name}", "", f"Failed: {outcome['cause']}", ""]
        else:
            lines += _table(outcome["section"])
    return "\n".join(lines)


def _table(section: Mapping[str, Any]) -> list[str]:
    columns = list(dict.fromkeys(key for row in section["rows"].values() for key in row))
    lines = [
        f"### {section['title']}",
        "",
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row, values in section["rows"].items():
        cells = [_cell(values.get(key)) for key in columns]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    missing = [f"Missing: {what} ({why})." for what, why in section["missing"].items()]
    return [*lines, "", *missing, ""]


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3f}"
