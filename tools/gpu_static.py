#!/usr/bin/env python
"""Compile the GPU kernels for each target, execute their PTX without a GPU (tools/ptx), and compare
every bit with the `reference` backend.

python tools/gpu_static.py                                  # everything: hours of one core
python tools/gpu_static.py --arches 90 --elements 20000     # a look
python tools/gpu_static.py --only "lamb: bfloat16" --arches 100
python tools/gpu_static.py --proof --arches 90              # the library's own self-test
"""

from __future__ import annotations

import sys
from pathlib import Path

import tyro
from rich.console import Console

from ptx.options import Options

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def main(options: Options) -> None:
    from ptx.runs import run  # from here on this process compiles kernels

    if not run(options, Console(width=200)):
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
