"""Every record as one JSON file and one Markdown page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from end_to_end.parts import PARTS
from end_to_end.rows import Part, Record, Sizes
from end_to_end.runner import Results

NOT_RUN = "not run"


def collected(results: Results, sizes: Sizes) -> dict[str, list[Record]]:
    """Return the records of all parts, in the order of the rows; one that was not run has no
    columns and the cause ``not run``."""
    found: dict[str, list[Record]] = {}
    for name, part in PARTS.items():
        found[name] = [
            results.record(name, row)
            or {"name": row.name, "source": row.source, "columns": None, "cause": NOT_RUN}
            for row in part.rows(sizes)
        ]
        if part.compare is not None:
            part.compare(found[name])
    rate = (found["card"][0]["columns"] or {}).get("tflops")
    for record in (each for name in PARTS if name != "card" for each in found[name]):
        if rate and record["columns"] and "tflops" in record["columns"]:
            record["columns"]["of_matmul"] = record["columns"]["tflops"] / rate
    return found


def write(results: Results, sizes: Sizes) -> None:
    """Write training.json and training.md next to the folder of the records."""
    found = collected(results, sizes)
    file = results.folder.with_suffix(".json")
    file.write_text(json.dumps({"parts": found}, indent=1) + "\n")
    file.with_suffix(".md").write_text(markdown(found))


def markdown(found: Mapping[str, list[Record]]) -> str:
    """Return the page: a table of each part, and what it was measured on."""
    lines: list[str] = []
    for name, part in PARTS.items():
        lines += [f"### {_title(name, part)}", "", *_table(part, found[name]), ""]
        machines = {_said(each["facts"]) for each in found[name] if each.get("facts")}
        lines += [f"{each}." for each in sorted(machines)] + [""] * bool(machines)
    return "\n".join(lines)


def _title(name: str, part: Part) -> str:
    return part.title if name == "card" else f"Part {name}. {part.title}"


def _table(part: Part, records: list[Record]) -> list[str]:
    columns = [
        key for key in part.columns if any(key in (each["columns"] or {}) for each in records)
    ]
    heads = ["row", *(part.columns[key] for key in columns), ""]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for each in records:
        values = [_cell((each["columns"] or {}).get(key)) for key in columns]
        lines.append("| " + " | ".join([_linked(each), *values, each["cause"]]) + " |")
    return lines


def _linked(record: Record) -> str:
    return f"[{record['name']}]({record['source']})" if record["source"] else str(record["name"])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float | int):
        return str(value or "")
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _said(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())
