"""``mp-optim conform``: output, exit status, and reports of crashed and hanging checks."""

import shlex
from typing import Any

import pytest
import torch

from mp_optim.apps.cli.command import main
from mp_optim.apps.conform import CHECKS, Subject, command_of, run
from mp_optim.apps.conform.runner import FAILS, PASSES, REFUSES, outcome_of
from support.launch import end_forked_program
from support.plain_adamw import built

ALIASING = "a_loaded_state_is_a_copy"
FAMILY = Subject("torch.optim.AdamW")


@pytest.mark.parametrize(
    ("name", "says"), [(ALIASING, "kit.Nonconformance"), ("hooks_run", "conforms")]
)
def test_conform_prints_a_command_that_runs_one_check(name, says):
    program, flag, code = shlex.split(command_of(CHECKS[name], FAMILY))
    assert (program, flag) == ("python", "-c")
    ended = end_forked_program(flag, code, timeout=120)
    assert says in ended.stdout + ended.stderr
    assert (ended.returncode == 0) == (says == "conforms")


def test_conform_reports_a_failure_when_a_check_crashes_or_hangs():
    subject = Subject("support.odd_optimizers.DyingAdamW")
    names = ["a_warm_up_from_zero_is_harmless", "zero_grad_clears", "hooks_run"]
    found = {each.name: (each.status, each.message) for each in run(subject, names, limit=4.0)}
    assert found == {
        "a_warm_up_from_zero_is_harmless": (FAILS, "the process ended by signal 11"),
        "zero_grad_clears": (FAILS, "no answer in 4 s"),
        "hooks_run": (PASSES, ""),
    }


def test_conform_reports_a_refused_step_unless_the_step_changed_a_parameter():
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
    assert status == FAILS and "after a refused step" in message


def test_conform_exits_with_1_when_a_check_of_the_level_fails(capsys):
    command = ["conform", "torch.optim.AdamW", "--args", "lr=0.01", "--only", ALIASING, "hooks_run"]
    assert main(command) == 0  # Only checks of level "should" failed.
    shown = capsys.readouterr().out
    assert "must" not in shown.splitlines()[0] and "1 FAILS, 1 passes" in shown
    assert f"checks.{ALIASING}(" in shown and "lr" in shown
    assert main([*command, "--level", "should"]) == 1
