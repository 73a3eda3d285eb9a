"""All parts as one readable document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def markdown(found: Mapping[str, Any]) -> str:
    """What was measured on, then one table a part."""
    machine = found["machine"]
    lines = [
        ", ".join(f"{key} {value}" for key, value in machine.items() if value) + ".",
        "",
    ]
    for name, section in found.items():
        if name == "machine":
            continue
        columns = list(
            dict.fromkeys(key for row in section["rows"].values() for key in row)
        )
        lines += [
            f"### {section['title']}",
            "",
            "| | " + " | ".join(columns) + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        lines += [
            f"| {row} | " + " | ".join(_cell(values.get(key)) for key in columns) + " |"
            for row, values in section["rows"].items()
        ]
        lines += [
            "",
            *(f"Missing: {what} ({why})." for what, why in section["missing"].items()),
            "",
        ]
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return (
        f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3f}"
    )
