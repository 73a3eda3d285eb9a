"""The kit itself: what it prints, how it ends, what it makes of crashes."""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mp_optim.apps.cli.command import main
from mp_optim.apps.conform import CHECKS, Subject, program_of, run
from mp_optim.apps.conform.runner import FAILS, PASSES, REFUSES, outcome_of
from support.launch import ROOT
from support.plain_adamw import built

ALIASING = "a_loaded_state_is_a_copy"
FAMILY = Subject("torch.optim.AdamW")


@pytest.mark.parametrize("name", CHECKS)
def test_a_program_stands_alone(name: str) -> None:
    """Nothing of this package, and every name that it uses is made or imported in it."""
    text = program_of(CHECKS[name], FAMILY)
    assert "mp_optim" not in text and "@must" not in text
    tree = ast.parse(text)
    named = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    stored = {n.id for n in named if isinstance(n.ctx, ast.Store)}
    made = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    arguments = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for n in ast.walk(tree)
        if isinstance(n, (ast.Import, ast.ImportFrom))
        for alias in n.names
    }
    caught = {n.name for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.name}
    known = {*stored, *made, *arguments, *imported, *caught, *dir(builtins)}
    used = {n.id for n in named}
    assert used - known == set()


def test_a_crash_and_a_hang_are_findings() -> None:
    subject = Subject("support.odd_optimizers.DyingAdamW")
    names = ["a_warm_up_from_zero_is_harmless", "zero_grad_clears", "hooks_run"]
    found = {each.name: (each.status, each.message) for each in run(subject, names, limit=12.0)}
    assert found == {
        "a_warm_up_from_zero_is_harmless": (FAILS, "the process ended by signal 11"),
        "zero_grad_clears": (FAILS, "no answer in 12 s"),
        "hooks_run": (PASSES, ""),
    }


def test_the_rank_that_failed_speaks() -> None:
    subject = Subject("support.odd_optimizers.OneSidedAdamW")
    names = ["fsdp2_trains_as_one_process", "meshes_may_be_mixed"]
    found = list(run(subject, names))
    assert [each.name for each in found] == names
    assert {each.message for each in found} == {"raised RuntimeError: rank 1 is out of memory"}


def test_a_refusal_is_no_failure_and_may_change_nothing() -> None:
    class Refusing(built()):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                if param.dtype == torch.float64:
                    param.data += self.bad
                    raise TypeError("no float64")
            return super().step(closure)

    Refusing.bad = 0.0
    name = "float64_is_stepped_as_such"
    assert outcome_of(name, Refusing) == (REFUSES, "TypeError: no float64")
    Refusing.bad = 1.0
    status, message = outcome_of(name, Refusing)
    assert status == FAILS and "left its mark" in message


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["conform", "torch.optim.AdamW", "--args", "lr=0.01", "--only", ALIASING, "hooks_run"]
    folder = str(tmp_path / "programs")
    assert main([*command, "--programs", folder]) == 0  # no must has failed
    shown = capsys.readouterr().out
    assert "must" not in shown.splitlines()[0] and "1 FAILS, 1 passes" in shown
    assert "AdamW(params, **{**{'lr': 0.01}, **settings})" in shown
    assert [path.name for path in (tmp_path / "programs").iterdir()] == [f"{ALIASING}.py"]
    assert main([*command, "--level", "should"]) == 1


def test_the_pytest_plugin(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "mp_optim.apps.conform.pytest_plugin", "--conform", "torch.optim.AdamW"]
    command += ["-k", f"{ALIASING} or lr_may or own"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=280
    )
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert f"def {ALIASING}(make: Make)" in run.stdout and "test_own" not in run.stdout
