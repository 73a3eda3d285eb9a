"""``mp-optim COMMAND``: finds the module of a command, and imports no other.

What is wrong is said in a sentence, and tables survive a pipe.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = {
    "doctor": "what this machine can do for the optimizer, and why not",
    "plan": "memory of a model and its optimizer, before anything is allocated",
    "fit": "whether a model can be trained on a machine, activations included, and what to type",
    "convert": "optimizer state from and for torch, Megatron, apex and DeepSpeed",
    "inspect": "list, verify and compare checkpoints",
    "conform": "check any torch optimizer for what training programs rely on",
}
"""Each is a module of this package with ``main(arguments)``, which returns the exit status."""
WIDE = 10_000
_PACKAGES = {"yaml": "pyyaml"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line, by default this process's; returns the exit status.

    Raises:
        SystemExit: help was asked for (0), or the arguments are not understood (2).
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name not in COMMANDS:
        description = "Commands of mp_optim. mp-optim COMMAND --help says more."
        parser = argparse.ArgumentParser(prog="mp-optim", description=description)
        commands = parser.add_subparsers(metavar="COMMAND", required=True)
        for known, what in COMMANDS.items():
            commands.add_parser(known, help=what)
        parser.parse_args([name, *rest])

    return status_of(lambda: importlib.import_module(f"mp_optim.cli.{name}").main(rest))


def status_of(command: Callable[[], int]) -> int:
    """Exit status of a command. What is wrong with its input becomes one sentence on stderr, and
    status 1; 130 after Ctrl-C."""
    try:
        return command()
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "mp_optim":
            raise
        package = _PACKAGES.get(str(error.name), error.name)
        return _fail(f"this command needs {error.name}: pip install {package}")
    except OSError as error:
        is_named = error.filename is not None and error.strerror is not None
        return _fail(f"{error.filename}: {error.strerror}" if is_named else str(error))
    except (ValueError, TypeError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _fail(sentence: str) -> int:
    first_paragraph = sentence.partition("\n\n")[0]
    print(f"mp-optim: {first_paragraph}", file=sys.stderr)
    return 1


def console() -> Console:
    """Stdout: as wide as the terminal, or, in a pipe or file, as the tables need."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE)
