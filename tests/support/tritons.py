"""Compile all kernels with each supported Triton version, without a GPU.

python -m support.tritons 3.6.0 3.7.1      # these versions
python -m support.tritons --of-torch       # the version that each torch of the package index needs
python -m support.tritons --fetch          # download the oldest version for its test
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.launch import PATH, run

OLDEST = "3.6.0"
"""The oldest version that the backend supports; torch 2.10 installs it."""
OLDEST_TORCH = (2, 6)
ARCHES = ("80", "90", "100")
INEXACT = re.compile(
    r"\s(\S*(?:fma|mad)\.\S*f(?:16|32|64)\S*|\S+\.(?:ftz|approx|full)\S*|(?:mul|add|sub)\.f\S+)"
)
"""Instructions whose results differ from IEEE, or that the assembler may contract."""
SAID = """
import torch
torch.cuda.is_available = lambda: True
from mp_optim.kernels.triton import triton_backend
print(triton_backend()[1])
"""


def folder_of(version: str) -> Path:
    kept = os.environ.get("MP_OPTIM_TRITONS") or Path(sys.prefix) / "tritons"
    return Path(kept) / version


def fetch(version: str) -> Path:
    """Return the folder of an unpacked Triton version.

    Raises:
        SystemExit: pip cannot download the version.
    """
    folder = folder_of(version)
    if not (folder / "triton").is_dir():
        part = folder.with_name(f"{version}.part")
        _pip("install", "--no-deps", "--no-compile", "--target", str(part), f"triton=={version}")
        part.rename(folder)
    return folder


def compiled(version: str | None, arch: str, cache: Path) -> dict[str, dict[str, Any]]:
    """Return the output of ``support.workers.triton_ptx``: each kernel in one or two forms.

    Args:
        version: Triton version; None for the installed one.
    """
    return json.loads(_with(version, "-m", "support.workers.triton_ptx", arch, cache=cache))


def said_of(version: str) -> str:
    """Return the device of the Triton backend, or the reason why it does not run."""
    return _with(version, "-c", SAID).strip()


def pinned() -> dict[str, str]:
    said = _pip("index", "versions", "torch").stdout
    listed = said.partition("Available versions:")[2].splitlines()[0].split(",")
    releases = [each.strip() for each in listed if "+" not in each]
    found = {}
    for release in releases:
        if _numbers(release) < OLDEST_TORCH:
            continue
        options = ("--dry-run", "--quiet", "--no-deps", "--ignore-installed")
        report = _pip("install", *options, "--report", "-", f"torch==={release}").stdout
        needs = json.loads(report)["install"][0]["metadata"].get("requires_dist", [])
        asked = [re.match(r"triton\s*\(?([=~<>]+[\w.]+)", need) for need in needs]
        found[release] = next((each[1] for each in asked if each), "")
    return found


def latest(specifier: str) -> str:
    options = ("--dry-run", "--quiet", "--no-deps", "--ignore-installed")
    report = _pip("install", *options, "--report", "-", f"triton{specifier}").stdout
    return str(json.loads(report)["install"][0]["metadata"]["version"])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _with(version: str | None, *command: str, cache: Path | None = None) -> str:
    """Run Python with a Triton version instead of the installed one."""
    path = PATH if version is None else os.pathsep.join((str(fetch(version)), PATH))
    variables = {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    if cache is not None:
        variables["TRITON_CACHE_DIR"] = str(cache)
    return run(*command, timeout=900, **variables)


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"pip {' '.join(arguments)}: {done.stderr.strip()[-1000:]}")
    return done


def _check(version: str, arches: Sequence[str], cache: Path) -> list[str]:
    """Compile or expect a refusal; print a line for each target and return the failures."""
    said = said_of(version)
    print(f"triton {version}: {said}", flush=True)
    if _numbers(version) < _numbers(OLDEST):
        is_right = f"Triton {version} flushes denormals to 0" in said
        return [] if is_right else [f"triton {version}: not refused by name: {said}"]
    if said != f"Triton {version}":
        return [f"triton {version}: refused: {said}"]
    wrong = []
    for arch in arches:
        began = time.perf_counter()
        kernels = compiled(version, arch, cache / version)
        inexact = {
            label: sorted(set(INEXACT.findall(ptx)))
            for label, kernel in kernels.items()
            for ptx in kernel["ptx"]
            if INEXACT.search(ptx)
        }
        if inexact:
            wrong.append(f"{version}, sm_{arch}: {inexact}")
        most = max(kernel["used"].get("REG", 0) for kernel in kernels.values())
        print(
            f"triton {version}, sm_{arch}: {len(kernels)} kernels, at most {most} registers, "
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", help="of Triton")
    parser.add_argument("--of-torch", action="store_true")
    parser.add_argument("--fetch", action="store_true")
    parser.add_argument("--arches", nargs="+", default=ARCHES)
    options = parser.parse_args()
    versions = options.versions or [OLDEST]
    if options.of_torch:
        pins = pinned()
        for release, pin in pins.items():
            print(f"torch {release} asks for triton {pin or '(none)'}", flush=True)
        versions = [latest(pin) for pin in dict.fromkeys(pins.values()) if pin]
    if options.fetch:
        for version in versions:
            print(fetch(version))
        return
    wrong = []
    with tempfile.TemporaryDirectory() as cache:
        for version in dict.fromkeys(versions):
            wrong += _check(version, options.arches, Path(cache) / version)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
