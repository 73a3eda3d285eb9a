"""A pytest plugin that runs tests of the Triton backend with compiled kernels, executed from PTX
without a GPU instead of interpreted.

MP_OPTIM_PTX=90 python -m pytest -p support.executed_kernels tests/unit/kernels/test_conformance.py

As a program it runs a command of the lab with compiled kernels:

MP_OPTIM_PTX=90 MP_OPTIM_BACKENDS=triton python -m support.executed_kernels programs --programs 50

MP_OPTIM_LAUNCHES=FILE appends every form of a launch to FILE.
"""

import os
import sys
from pathlib import Path

import mp_optim.kernels.triton
from ptx import forms
from ptx.kernels import MachineBackend
from ptx.triton_driver import Launch, StaticDriver

NOTED: set[forms.Form] = set()
BACKEND = MachineBackend()


def carry(launch: Launch) -> None:
    NOTED.add(forms.form_of(launch))
    BACKEND.carry_out(launch)


ARCH = int(os.environ.get("MP_OPTIM_PTX", "90"))
StaticDriver(ARCH, carry).__enter__()
mp_optim.kernels.triton.triton_backend = lambda: (BACKEND, f"PTX of sm_{ARCH}")


def pytest_sessionfinish() -> None:
    if file := os.environ.get("MP_OPTIM_LAUNCHES"):
        forms.add_to(Path(file), NOTED)


if __name__ == "__main__":
    from lab.__main__ import main

    status = main(sys.argv[1:])
    pytest_sessionfinish()
    sys.exit(status)
