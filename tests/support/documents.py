"""Read code blocks and tables from the documentation."""

import re

from support.launch import ROOT


def blocks_of(page: str, language: str) -> list[str]:
    """Return the code blocks of a page of docs/, except programs copied from tools/."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def lines_for(program: str) -> list[str]:
    """Return the code snippets that the integrations table lists for a program."""
    page = (ROOT / "docs/clients/index.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(program)} \|(.*)$", page, re.MULTILINE)
    return re.findall(r"`([^`]+)`", row.split(" | ")[0])
