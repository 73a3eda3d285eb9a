"""The number of calls into Triton for a launch, counted with a stand-in driver."""

import json
import sys

import pytest

from support.launch import run

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is for Linux")


def test_triton_compiles_no_kernel_after_step_8_of_an_adam_program(tmp_path):
    """The program has two groups, changing learning rates and missing gradients. It uses one kernel
    of Adam and two kernels of sums."""
    program = "tools/measuring/launches.py"
    found = json.loads(run("-W", "ignore", program, TRITON_CACHE_DIR=str(tmp_path)))
    assert found["kernels after 1000 steps"] == found["kernels after 8 steps"] == 3
    assert found["asked after 1000 steps"] == found["asked after 8 steps"] <= 6
