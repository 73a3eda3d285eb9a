"""Tests that need an accelerator are marked, skipped where there is none, and listed at the end as not run."""

from __future__ import annotations

import pytest
import torch

_NEEDS_A_GPU = "needs an accelerator that torch can use"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=_NEEDS_A_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    waiting = [report.nodeid for report in terminalreporter.stats.get("skipped", [])
               if "gpu" in report.keywords]
    if waiting:
        terminalreporter.section(f"{len(waiting)} tests did not run: {_NEEDS_A_GPU}")
        for nodeid in waiting:
            terminalreporter.line(nodeid)
