"""The machine on kernels that are not ours, as Triton compiles them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.launch import run

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is for Linux")


@pytest.mark.parametrize(
    "arch", ["90", *(pytest.param(a, marks=pytest.mark.slow) for a in ("80", "100", "120"))]
)
def test_others_kernels_do_what_they_do_in_torch(arch: str, tmp_path: Path) -> None:
    printed = run("-m", "support.workers.ptx_tutorials", arch, TRITON_CACHE_DIR=str(tmp_path))
    found = json.loads(printed)
    assert found.pop("softmax") < 1e-6
    assert found == {
        "vector_add": 0.0,
        "largest": 0.0,
        "transposed": 0.0,
        "vector_add without a guard": "out of bounds",
        "all_write_one": "race",
    }
