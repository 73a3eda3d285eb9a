"""What a compiled kernel takes of a multiprocessor, as Triton's ``cuobjdump`` prints it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_PROGRAM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def usage(cubin: bytes) -> dict[str, int]:
    """Return ``REG`` of a thread, ``STACK`` and ``LOCAL`` in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_PROGRAM), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)
    return {name: int(number) for name, number in found}
