"""``mp-optim COMMAND``: finds the module of a command, and imports no other."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from mp_optim.cli.shell import status_of

COMMANDS = {
    "doctor": "what this machine can do for the optimizer, and why not",
    "plan": "memory of a model and its optimizer, before anything is allocated",
    "convert": "optimizer state from and for torch, Megatron, apex and DeepSpeed",
    "inspect": "list, verify and compare checkpoints",
    "trace": "draw one step of an offloaded optimizer, thread by thread",
}
"""Each is a module of this package with ``main(arguments)``, which returns the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line, by default this process's; returns the exit status.

    Raises:
        SystemExit: help was asked for (0), or the arguments are not understood (2).
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if given[0] not in COMMANDS:
        _parser().parse_args(given)
    return status_of(lambda: _run(given[0], given[1:]))


def _run(name: str, arguments: Sequence[str]) -> int:
    status: int = importlib.import_module(f"mp_optim.cli.{name}").main(arguments)
    return status


def _parser() -> argparse.ArgumentParser:
    """Knows the names of the commands: for the help, and for names that are none."""
    parser = argparse.ArgumentParser(
        prog="mp-optim",
        description="Commands of mp_optim. mp-optim COMMAND --help says more.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, what in COMMANDS.items():
        commands.add_parser(name, help=what)
    return parser
