"""Every record as one JSON file, one Markdown page and one picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from end_to_end import part_a, part_b, part_c, part_e, picture
from end_to_end.rows import Part, Record, Row, Sizes
from end_to_end.runner import Results

NOT_RUN = "not run"
PAGE = Path(__file__).with_name("page.md")
"""The text above the tables; ``PUBLISHED`` is replaced."""
PREDICTIONS: dict[str, Any] = json.loads(Path(__file__).with_name("predictions.json").read_text())
"""Columns by part and row, as models of memory, bus and operations predicted them before any GPU
had run a row. Never change one: ``page.md`` says how they were made, and what refutes them."""
SLACK, MEMORY_SLACK, SHARE_SLACK = 1.3, 1.1, 0.2
"""Factors of a time and of a peak, and the distance of a share, that refute a prediction."""
PARTS: dict[str, Part] = {
    "card": Part(
        "The card",
        lambda sizes: [Row("rates", "measure:card", {"rounds": 1 if sizes.miniature else 5}, 60)],
        {"tflops": "TFLOPS, 8192 x 8192 bf16 matmul"},
        0.3,
    ),
    **{"D": part_a.SHARES, "A": part_a.PART, "B": part_b.PART, "E": part_e.PART, "C": part_c.PART},
}
"""In the order of their worth. ``card`` is run before any other; its matmul rate is their unit."""


def collected(results: Results, sizes: Sizes) -> dict[str, list[Record]]:
    """Return the records of all parts, in the order of the rows; one that was not run has no
    columns and the cause ``not run``."""
    found: dict[str, list[Record]] = {}
    for name, part in PARTS.items():
        found[name] = [
            (
                results.record(name, row)
                or {
                    "name": row.name,
                    "arguments": dict(row.arguments),
                    "source": row.source,
                    "columns": None,
                    "cause": NOT_RUN,
                }
            )
            | {"predicted": {} if sizes.miniature else PREDICTIONS.get(name, {}).get(row.name, {})}
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
    """Write training.json, training.md and training.png next to the folder of the records."""
    found = collected(results, sizes)
    file = results.folder.with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    data = {"parts": found, "published": picture.PUBLISHED}
    file.write_text(json.dumps(data, indent=1) + "\n")
    file.with_suffix(".md").write_text(markdown(found))
    picture.draw(found["A"], PREDICTIONS["curves"], file.with_suffix(".png"))


def markdown(found: Mapping[str, list[Record]]) -> str:
    published = ", ".join(f"[{each['name']}]({each['source']})" for each in picture.PUBLISHED)
    lines = [PAGE.read_text().replace("PUBLISHED", published)]
    for name, part in PARTS.items():
        title = part.title if name == "card" else f"Part {name}. {part.title}"
        lines += [f"## {title}", ""] + [part.text] * bool(part.text)
        lines += [*_table(part, found[name]), ""]
        machines = {_said(each["facts"]) for each in found[name] if each.get("facts")}
        lines += [f"{each}." for each in sorted(machines)] + [""] * bool(machines)
    return "\n".join(lines).rstrip() + "\n"


def _table(part: Part, records: list[Record]) -> list[str]:
    columns = [
        key for key in part.columns if any(key in (each["columns"] or {}) for each in records)
    ]
    guesses = list(dict.fromkeys(key for each in records for key in each["predicted"]))
    heads = ["row", *(f"{_head(part, key)}, predicted" for key in guesses)]
    heads += [_head(part, key) for key in columns]
    lines = ["| " + " | ".join([*heads, ""]) + " |", "|---" * (len(heads) + 1) + "|"]
    for each in records:
        cells = [_cell(each["predicted"].get(key)) for key in guesses]
        cells += [_cell((each["columns"] or {}).get(key)) for key in columns]
        lines.append("| " + " | ".join([_linked(each), *cells, _verdict(part, each)]) + " |")
    return lines


def _head(part: Part, column: str) -> str:
    return part.columns.get(column, "host GiB")


def _verdict(part: Part, record: Record) -> str:
    """Return why there is no result, or the columns that refute their prediction."""
    columns = record["columns"] or {}
    refuted = [
        _head(part, key)
        for key, value in record["predicted"].items()
        if key in columns and is_refuted(key, value, columns[key])
    ]
    return str(record["cause"]) or (f"refuted: {'; '.join(refuted)}" if refuted else "")


def is_refuted(column: str, predicted: Any, measured: Any) -> bool:
    """True if a measured value refutes a predicted one."""
    if isinstance(predicted, bool | str):
        return str(measured).partition(":")[0] != str(predicted)
    if column == "tokens_per_s":
        return bool(measured < predicted / SLACK)
    if column == "moved_bf16":
        return abs(measured - predicted) > SHARE_SLACK
    return bool(measured > predicted * (MEMORY_SLACK if column == "allocated" else SLACK))


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
