"""Other test modules pass on the simulated accelerator, which detects a missing wait."""

import subprocess
import sys

import pytest

from support.launch import ROOT, environment

SUITES = (
    "tests/unit/offload/test_offload_modes.py::test_speculation_changes_nothing_when_a_huge_gradient_is_skipped",
    "tests/unit/offload/test_release_gradients.py::test_named_gradients_returns_a_gradient_after_its_release",
    "tests/unit/rules/test_audit.py::test_audit_error_refuses_step_and_save_until_a_load",
)
WITHOUT_A_WAIT = """
import torch

def test_copy_is_read_without_a_wait():
    there = 2 * torch.ones(4)
    here = torch.empty(4, device="cpu").copy_(there, non_blocking=True)
    assert here.tolist() == [2.0] * 4
"""


@pytest.mark.slow
def test_simulated_accelerator_fails_a_test_that_leaves_out_a_wait(tmp_path):
    program, report = tmp_path / "test_program.py", tmp_path / "report"
    program.write_text(WITHOUT_A_WAIT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.on_accelerator"]
    variables = environment(MP_OPTIM_REPORT=str(report))
    subprocess.run([*command, *SUITES, str(program)], cwd=ROOT, env=variables, timeout=200)
    ended = [line.split("\t")[:3] for line in report.read_text().splitlines()]
    assert len(ended) == 5
    for outcome, touched, name in ended:
        assert touched == "touched", name
        assert outcome == ("failed" if "without_a_wait" in name else "passed"), name
