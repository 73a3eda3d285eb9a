"""``python tests/lab COMMAND``: finds the module of a command, and imports no other."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

COMMANDS = {
    "programs": ("lab.any_program.command", "random programs against an oracle in numpy"),
    "layouts": ("lab.layout_fuzz.command", "random layouts of ranks against one process"),
    "tenants": ("lab.tenants", "many tenants of one optimizer against runs alone"),
    "mutants": ("lab.mutants", "small faults, and whether a test notices them"),
    "levels": ("lab.levels", "tests that step something, by each level of native kernels"),
    "nightly": ("lab.nightly", "all of these and the kill tests, as long as a night"),
}
"""Module and meaning of each. A module has ``Options`` and ``main(options)``, which returns the
exit status."""


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python tests/lab", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what)
    given = list(arguments) or ["--help"]
    if given[0] not in COMMANDS:
        parser.parse_args(given)
    command = importlib.import_module(COMMANDS[given[0]][0])
    prog = f"python tests/lab {given[0]}"
    options = tyro.cli(command.Options, args=given[1:], prog=prog, description=command.__doc__)
    status: int = command.main(options)
    return status


if __name__ == "__main__":
    tests = Path(__file__).resolve().parents[1]
    # Python begins with this folder, whose modules are those of the package `lab`
    sys.path[0] = str(tests)
    sys.path[1:1] = [str(tests.parent), str(tests.parent / "tools")]
    sys.exit(main(sys.argv[1:]))
