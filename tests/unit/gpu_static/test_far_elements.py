"""Compiled kernels use 64-bit offsets: they are executed on elements beyond 2^31."""

import sys

import pytest

from support.launch import run

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is for Linux")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_compiled_kernels_step_and_sum_elements_beyond_2_to_the_31(arch, tmp_path):
    """An offset without its upper 32 bits would access memory outside of every tensor."""
    said = run("-m", "support.workers.far_elements", arch, TRITON_CACHE_DIR=str(tmp_path))
    assert int(said) > 60
