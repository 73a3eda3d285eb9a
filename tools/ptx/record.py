"""The status of every GPU target, card and feature, in one file: ``docs/gpu.json``.

Pages state hardware status in generated parts alone, so that no page contradicts another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ptx.figures import figures

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "gpu.json"
PAGE = FILE.with_suffix(".md")
TARGETS = {
    "sm_80": "A100",
    "sm_86": "RTX 3090, A10G",
    "sm_89": "RTX 4090, L4, L40S",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_120": "RTX 50",
}
"""Targets, and a card that each is of."""
KNOWN = {
    "compiled": "compiled",
    "executed": "executed from PTX, the bits of `reference`",
    "proven": "self-test on PTX, a step of each rule",
    "ran": "run and timed",
}
"""Row headings of the table of targets."""
_TABLE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SENTENCE = re.compile(r"(<!-- gpu: ([\w ]+) -->).*?(<!-- end -->)", re.DOTALL)


def load() -> dict[str, Any]:
    """Return the record.

    Returns:
        ``targets``: by target, the text of each key of ``KNOWN``; ``features``: by name, their
        subject and the cards that ran and timed them.
    """
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def note(target: str, what: str, said: str) -> None:
    """Record what is known of a target."""
    assert target in TARGETS and what in KNOWN, (target, what)
    found = load()
    found["targets"].setdefault(target, {})[what] = said
    _write(found)


def _write(found: dict[str, Any]) -> None:
    targets = {target: found["targets"][target] for target in TARGETS if target in found["targets"]}
    features = [
        f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in found["features"].items()
    ]
    text = json.dumps(targets, indent=2).replace("\n", "\n ")
    FILE.write_text(
        f'{{\n "targets": {text},\n "features": {{\n' + ",\n".join(features) + "\n }\n}\n"
    )


def pages() -> list[Path]:
    """Return the README and every Markdown page of the docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page(text: str) -> str:
    """Return a page's text with its generated tables and sentences up to date."""
    found = load()
    tables = {
        "targets": lambda: table(["", *_heads()], _by_target(found["targets"])),
        "hardware": lambda: table(_HARDWARE, _hardware(found["targets"])),
        "features": lambda: table(["", "ran on", "timed on"], _by_feature(found["features"])),
        "figures": figures,
    }

    def made(match: re.Match[str]) -> str:
        return match[1] + "\n".join(tables[match[2]]()) + "\n" + match[3]

    def said(match: re.Match[str]) -> str:
        return match[1] + " ".join(sentence(name) for name in match[2].split()) + match[3]

    return _SENTENCE.sub(said, _TABLE.sub(made, text))


def without_made(text: str) -> str:
    """Return a page's text without its generated tables and sentences."""
    return _SENTENCE.sub("", _TABLE.sub("", text))


def sentence(name: str) -> str:
    """Return the sentence that states the hardware status of a feature, or of all: ``status``."""
    features = load()["features"]
    if name == "status":
        ran = dict.fromkeys(card for one in features.values() for card in one["ran"])
        never = [one["headline"] for one in features.values() if "headline" in one]
        return f"Run and timed on {_joined(ran)}. Not run: {', '.join(never)}."
    one = features[name]
    if "sentence" in one:
        return str(one["sentence"])
    subject, was, has = (
        (one["subject"], "were", "have") if one["plural"] else (one["subject"], "was", "has")
    )
    if one["timed"]:
        return f"{subject} {was} timed on {_joined(one['timed'])}."
    if one["ran"]:
        return f"{subject} ran on {_joined(one['ran'])} with the expected bits, not timed."
    return f"{subject} {has} not run on a GPU."


def _joined(cards: Iterable[str]) -> str:
    return " and ".join(f"an {card}" for card in cards)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield from ("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def _heads() -> list[str]:
    return [f"{target} ({card})" for target, card in TARGETS.items()]


def _by_target(targets: dict[str, dict[str, str]]) -> Iterator[list[str]]:
    for what, words in KNOWN.items():
        yield [words, *(targets.get(target, {}).get(what, "no") for target in TARGETS)]


_HARDWARE = [
    "NVIDIA and AMD GPUs",
    "Triton kernels compiled",
    "compiled code executed by an emulator",
    "run on the card",
    "step time",
]


def _hardware(targets: dict[str, dict[str, str]]) -> Iterator[list[str]]:
    """Yield a short row for each target."""
    for target, card in TARGETS.items():
        known = targets.get(target, {})
        ran = known.get("ran", "not run")
        time = "measured" if "ran" in known else "-"
        same = "same bits as the CPU" if "executed" in known else "no"
        yield [f"{target}: {card}", "yes" if "compiled" in known else "no", same, ran, time]
    yield ["AMD", "yes", "no", "never run", "-"]


def _by_feature(features: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    for one in features.values():
        ran, timed = (", ".join(one[key]) or "no GPU" for key in ("ran", "timed"))
        yield [one["subject"], ran, timed]
