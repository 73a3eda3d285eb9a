"""A sample of the Triton kernels, compiled for each target and executed from PTX. The command
``python tools/gpu_static.py`` executes all of them."""

import sys
from pathlib import Path

import pytest

from mp_optim.config.rules import KERNEL_RULES
from ptx import forms
from support.launch import run

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is for Linux")


def static(cache: Path, *options: str) -> str:
    return run("-W", "ignore", "tools/gpu_static.py", *options, TRITON_CACHE_DIR=str(cache))


@pytest.mark.slow
def test_compiled_kernels_give_recorded_bits_for_each_rule(tmp_path):
    assert "sm_90: same bits as reference;" in static(tmp_path, "--proof", "--arches", "90")


@pytest.mark.parametrize(
    "arches",
    [("90",), pytest.param(("80", "86", "89", "90", "100", "120"), marks=pytest.mark.slow)],
    ids=["one", "every"],
)
def test_compiled_kernels_have_bits_of_reference_on_each_target(arches, tmp_path):
    only = "^sgd: float32 - - float32 float32 -, aligned, host$"
    printed = static(tmp_path, "--elements", "12000", "--only", only, "--arches", *arches)
    assert "1 trials of" in printed and " 0 wrong" in printed, printed
    assert printed.count(" forms, 0 not in the list;") == len(arches), printed


def test_recorded_kernel_list_has_every_rule_and_no_form_twice():
    known = forms.read()
    assert len(known) == len(set(known))
    kernels = {form.kernel for form in known}
    pairs = {"lamb_moments", "lamb_apply"}
    muon = {"muon_momentum", "muon_apply"}
    elements = {rule for rule in KERNEL_RULES if rule != "lamb"}
    assert kernels == elements | pairs | muon | {"chunk_sums", "run_sums"}
    aligned = {form.values.get("ALIGNED") for form in known if form.kernel in elements}
    assert aligned == {"True", "False"}
