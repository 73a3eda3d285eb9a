"""Copies of the package that are installed outside of the checkout."""

import re
import shutil
from pathlib import Path

from support.launch import ROOT


def copy_package(folder: Path, *leave_out: str) -> Path:
    hidden = shutil.ignore_patterns(*leave_out, "__pycache__")
    shutil.copytree(ROOT / "mp_optim", folder / "mp_optim", ignore=hidden)
    return folder


def make_kernels_stale(folder: Path) -> None:
    loader = folder / "mp_optim/kernels/native_library.py"
    source, count = re.subn(
        r"^_ABI = (\d+)$",
        lambda match: f"_ABI = {int(match[1]) + 1}",
        loader.read_text(),
        flags=re.MULTILINE,
    )
    assert count == 1
    loader.write_text(source)
