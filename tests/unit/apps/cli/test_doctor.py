"""``mp-optim doctor`` reports the backends of this machine."""

import pytest
import torch

from mp_optim.config.rules import BACKENDS
from mp_optim.kernels.native_library import native_library
from support.launch import run_forked_program


def run_without_triton(**environment: str) -> str:
    command = ("-m", "mp_optim.apps.cli", "doctor")
    return run_forked_program(*command, timeout=120, TRITON_INTERPRET="0", **environment)


@pytest.fixture(scope="module")
def text() -> str:
    return run_forked_program("-m", "mp_optim.apps.cli", "doctor", timeout=120)


def row_of(text: str, backend: str) -> list[str]:
    table = text.split("same bits as reference  rules")[1].splitlines()
    return next(line.split() for line in table if line.split()[:1] == [backend])


def test_doctor_shows_whether_each_backend_is_usable_and_exact(text):
    for name in BACKENDS[1:]:
        usable, exact = row_of(text, name)[2:4]
        assert (usable, exact) in {("yes", "yes"), ("yes", "no"), ("no", "-")}
    assert row_of(text, "reference")[2:4] == ["yes", "yes"]
    for fact in (
        "torch ",
        "native kernels",
        "threads of torch",
        "pinned memory",
        "fused_backend='auto' takes",
    ):
        assert fact in text


@pytest.mark.skipif(native_library().handle is None, reason="no native kernels here")
def test_doctor_shows_the_instruction_set_when_native_kernels_are_usable(text):
    assert f"native kernels {native_library().level} of" in " ".join(text.split())
    assert row_of(text, "native")[2:4] == ["yes", "yes"]


def test_doctor_names_the_cause_when_native_kernels_are_missing():
    text = run_without_triton(MP_OPTIM_NATIVE="off")
    assert row_of(text, "native")[2:] == [
        "no",
        "-",
        "adam,",
        "lamb,",
        "sgd,",
        "lion",
        "MP_OPTIM_NATIVE=off",
    ]
    assert "none: MP_OPTIM_NATIVE=off" in text and "cpu  reference  auto:" in text


@pytest.mark.gpu
def test_doctor_shows_the_gpu_when_cuda_is_available(text):
    assert torch.cuda.get_device_name(0) in text and "cuda:0  " in text
