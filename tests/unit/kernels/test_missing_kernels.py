"""Installations with and without native or Triton kernels."""

import os
import shutil
from pathlib import Path

import pytest

from mp_optim.kernels.native_library import native_library
from mp_optim.kernels.triton import triton_backend
from support.installed import copy_package
from support.launch import TOOLS, run_forked_program

PROGRAM = """
import sys, warnings
sys.path.remove("")  # the checkout
import torch, mp_optim
assert mp_optim.__file__.startswith(sys.argv[1]), mp_optim.__file__
model = torch.nn.Linear(4, 4).bfloat16()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        optimizer = BUILD
    said = len(caught)
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
assert len(caught) == said, "only construction says it"
for warning in caught:
    print(warning.filename, warning.message)
"""

STACK = "mp_optim.get_megatron_optimizer(mp_optim.OptimizerConfig(lr=0.1, bf16=True), model)"
CLASS = "mp_optim.AdamW(model.parameters(), lr=0.1)"


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_package(tmp_path_factory.mktemp("installed"), "_native*")


def said_by(folder: Path, how: str, **environment: str) -> str:
    program, path = PROGRAM.replace("BUILD", how), f"{folder}:{TOOLS}"
    return run_forked_program("-c", program, str(folder), PYTHONPATH=path, **environment)


@pytest.mark.parametrize("how", [STACK, CLASS], ids=["stack", "class"])
def test_construction_warns_once_when_native_kernels_are_missing(without_compiler, how):
    said = said_by(without_compiler, how, MP_OPTIM_NATIVE="")
    assert said.count("native kernels are missing") == 1
    assert said.startswith("<string>"), "the warning points at the caller's line"
    assert "without a C++ compiler" in said and "about 11 times as long" in said
    assert "install a wheel" in said and "MP_OPTIM_NATIVE=off" in said


def test_construction_does_not_warn_when_native_kernels_are_switched_off(without_compiler):
    assert said_by(without_compiler, STACK, MP_OPTIM_NATIVE="off") == ""


@pytest.mark.skipif(os.environ.get("MP_OPTIM_NATIVE") == "off", reason="native kernels are off")
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_native_library_loads_when_a_compiler_is_installed():
    """Tests of kernels are skipped without the library, which would look like success."""
    library = native_library()
    assert library.handle is not None or library.why.startswith("this CPU has none"), library.why


def test_triton_backend_loads_when_triton_is_installed():
    pytest.importorskip("triton")
    backend, why = triton_backend()
    assert backend is not None, why
