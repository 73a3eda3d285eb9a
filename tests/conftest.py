"""Tests that need an accelerator are marked, skipped where there is none, and listed at the end as
not run."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import interpreter
from support.one_rank import one_rank as in_one_rank

if not torch.cuda.is_available() and "triton" not in sys.modules:
    # read when Triton is imported: its kernels run on the CPU then
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpreter.look_once()

# Read when cuBLAS is first used: up to torch 2.9 a deterministic matmul raises without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Processes that share a host, as far as the host kernels' threads are concerned.
    os.environ.setdefault("LOCAL_WORLD_SIZE", workers)

_NEEDS_A_GPU = "needs an accelerator that torch can use"
_QUICK = (
    *("config/", "param_groups/", "core/", "host/", "mixed_precision/test_step.py"),
    "zero/test_sharding_plan.py",
    *("checkpoint/test_commit.py", "checkpoint/test_plans.py", "checkpoint/test_versions.py"),
    *("offload/test_step_plans.py", "optimizers/test_same_bits.py"),
    *("stack/test_contract.py", "stack/test_placement_invariance.py"),
    "stack/test_upstream_defects.py",
    *("kernels/test_conformance.py", "kernels/test_formats.py", "kernels/test_native.py"),
    "rules/test_rules.py",
)
"""Folders and files below ``tests/unit`` that ``-m quick`` runs: within three minutes they find a
fault in code that everything else uses."""
_MOVED = [path for path in _QUICK if not (Path(__file__).parent / "unit" / path).exists()]
if _MOVED:
    raise FileNotFoundError(
        f"_QUICK={_MOVED}: tests/unit has no such path; correct tests/conftest.py"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from support.scheduling import ModuleFixturesOnce  # where xdist is installed

    return ModuleFixturesOnce(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_quick(items)
    _leave_out_of_coverage(config, items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=_NEEDS_A_GPU))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def _mark_quick(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.as_posix().rpartition("/tests/unit/")[2]
        is_long = item.get_closest_marker("slow") or item.get_closest_marker("repeats")
        if path.startswith(_QUICK) and not is_long:
            item.add_marker(pytest.mark.quick)


def _leave_out_of_coverage(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("_cov") or config.getoption("cov_context"):
        return
    for item in items:
        if item.get_closest_marker("repeats"):
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture(autouse=True)
def _no_state_of_accelerates() -> Iterator[None]:
    before = {name for name in os.environ if name.startswith("ACCELERATE_")}
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        if name not in before:
            del os.environ[name]
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def _no_threads_are_left_set() -> Iterator[None]:
    yield
    if threads := sys.modules.get("mp_optim.kernels.native_library"):
        threads.set_host_threads(None)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reasons.setdefault(report.longrepr[2].removeprefix("Skipped: "), []).append(report.nodeid)
    for reason, nodeids in reasons.items():
        terminalreporter.section(f"{len(nodeids)} tests did not run: {reason}")
        for nodeid in nodeids:
            terminalreporter.line(nodeid)


@pytest.fixture
def one_rank() -> Iterator[None]:
    with in_one_rank():
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Have torch use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
