"""Benchmarks with compiled kernels of another version than the package."""

import pytest

from support.installed import copy_package, make_kernels_stale
from support.kernels import needs_kernels
from support.launch import TOOLS, run_forked_program

BENCHMARKS = {path.stem for path in TOOLS.glob("benchmark_*.py")}
PROGRAM = """
import runpy, sys
sys.path.remove("")  # the checkout
import mp_optim
from mp_optim.apps.cli import doctor
_, folder, tools, *names = sys.argv
assert mp_optim.__file__.startswith(folder), mp_optim.__file__
for name in names:
    sys.argv[1:] = ["limit", "--folder", folder] if name == "benchmark_disk" else []
    try:
        runpy.run_path(f"{tools}/{name}.py", run_name="__main__")
    except SystemExit as refused:
        print(name, refused.code)
doctor.main([])
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = copy_package(tmp_path_factory.mktemp("stale"))
    make_kernels_stale(folder)
    names = sorted(BENCHMARKS)
    variables = {"PYTHONPATH": f"{folder}:{TOOLS}", "TRITON_INTERPRET": "0"}
    return run_forked_program(
        "-c", PROGRAM, str(folder), str(TOOLS), *names, MP_OPTIM_NATIVE="", **variables
    ).splitlines()


@needs_kernels
def test_benchmarks_refuse_kernels_of_another_version(printed):
    refused = [line for line in printed if "nothing was measured" in line]
    assert {line.split()[0] for line in refused} == BENCHMARKS
    for line in refused:
        assert "fused_backend='auto' takes 'reference'" in line
        assert "has interface" in line and "this version needs" in line
        assert "pip install -e ." in line


@needs_kernels
def test_doctor_names_kernels_of_another_version(printed):
    (row,) = (line for line in printed if line.startswith("native kernels"))
    assert "none: _native" in row and "has interface" in row
    (chosen,) = (line for line in printed if line.startswith("cpu  reference"))
    assert "no native kernels" in chosen and "this version needs" in chosen
