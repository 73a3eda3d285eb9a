"""docs/gpu.json is the only source of hardware status: pages and messages repeat its sentences."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from ptx import record
from support.launch import ROOT

PAGES = [page for page in record.pages() if page.parent.name != "upstream-reports"]
DENIAL = re.compile(
    r"\b(?:never|no|not|none|nothing|neither|nor)\b[^.|]*?"
    r"\b(?:measured|timed|run|ran|executed|tried|taken|tested|compared)\b",
    re.IGNORECASE,
)
HARDWARE = re.compile(
    r"\bGPUs?\b|\bCUDA\b|\bNCCL\b|\b[ABH][1-3]00\b|\bcards?\b|\bTransformer Engine\b|\bAMD\b"
)
CLAIM = re.compile(
    r"\b(?:measured|timed|run|ran|runs|executed) on (?:an?|one|the) "
    r"(A10G?|A100|B200|L4|L40S?|RTX \d+|MI\d+X?|GH200|T4|V100)\b"
)
OF_OTHERS = re.compile(r"\]\(http|Missing: ")
"""Rows with figures of other projects, and parts that a recorded run left out."""


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences and table cells of a page, except generated parts."""
    joined = re.sub(r"(?<=[^|\n])\n(?![\n|#*-])", " ", record.without_made(text))
    for line in joined.splitlines():
        yield from re.split(r"(?<=[.;])\s|\s\|\s", line)


def contradictions(text: str) -> list[str]:
    """Return the sentences that state a hardware status which docs/gpu.json does not contain."""
    return [
        one
        for one in sentences(text)
        if (CLAIM.search(one) or (DENIAL.search(one) and HARDWARE.search(one)))
        and not OF_OTHERS.search(one)
        and not any(each in _plain(one) for each in known_sentences())
    ]


@cache
def known_sentences() -> list[str]:
    """Return the status sentence of every feature, in plain text."""
    return [_plain(record.sentence(name)) for name in record.load()["features"]]


def _plain(sentence: str) -> str:
    return sentence.replace("`", "").rstrip(".").lower()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_state_hardware_status_only_as_in_gpu_json(page):
    assert contradictions(page.read_text()) == []


def test_messages_state_hardware_status_only_as_in_gpu_json():
    found = []
    for path in (ROOT / "mp_optim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += contradictions(node.value)
    assert found == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Nothing of this was measured by us on a GPU.",
        "All of this is tested on a simulated accelerator, and was never measured on a GPU.",
        "Speed is not in the table: nothing of ours was measured on a GPU.",
        "The kernels were measured on an A100.",
        "modelled: never measured on a GPU",
    ],
)
def test_status_scan_reports_a_hardware_sentence_outside_the_gpu_marks(sentence):
    assert contradictions(f"A page.\n\n- {sentence}\n") != []
