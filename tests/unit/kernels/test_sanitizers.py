"""Native kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.launch import ROOT

HERE = Path(__file__).parent
KERNELS = ROOT / "mp_optim" / "kernels" / "csrc"
RESULTS = "f30c4cb297f75fe3"
"""Hash of all results of the driver. GCC and clang on x86-64 and GCC on 64-bit Arm print the same
hash. It changes only with the formulas of docs/numerics.md."""
COMPILER = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def compiler(*arguments: str) -> None:
    built = subprocess.run([str(COMPILER), *arguments], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_native_kernels_have_no_sanitizer_reports(sanitizers, tmp_path):
    program = tmp_path / "driver"
    flags = [
        "-std=c++17",
        "-O1",
        "-g1",  # line numbers for reports; full -g doubles the compile time
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wno-psabi",
        f"-fsanitize={sanitizers}",
        "-fno-sanitize-recover=all",
        f"-I{KERNELS}",
        "-pthread",
    ]
    sources = [*sorted(KERNELS.glob("*.cpp")), HERE / "csrc" / "driver.cpp"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(
            pool.map(
                lambda source: compiler(
                    *flags, "-c", str(source), "-o", str(tmp_path / f"{source.stem}.o")
                ),
                sources,
            )
        )
    compiler(
        *flags, *(str(tmp_path / f"{source.stem}.o") for source in sources), "-o", str(program)
    )
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=240)
    # ThreadSanitizer does not support systems that randomise addresses widely.
    if "unexpected memory mapping" in ran.stderr:
        ran = subprocess.run(
            ["setarch", "--addr-no-randomize", str(program)],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert f"0 failures, results {RESULTS}" in ran.stdout
