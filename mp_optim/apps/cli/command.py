"""``mp-optim COMMAND``: finds the module of a command, and imports only that module.

Errors are printed as one sentence. Tables keep their full width in a pipe.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = {
    "doctor": ("cli.doctor", "kernels, threads and accelerators that this machine can use"),
    "plan": (
        "fit.plan_command",
        "memory of a model and its optimizer, before anything is allocated",
    ),
    "fit": (
        "fit.command",
        "whether a model can be trained on a machine, activations included, and what to type",
    ),
    "convert": (
        "convert.command",
        "optimizer state from torch, Megatron, apex and DeepSpeed, and to torch",
    ),
    "inspect": ("cli.inspect", "list, verify and compare checkpoints"),
    "replay": ("replay", "carry out a recorded step again on a CPU, and name what differs"),
    "conform": ("conform.command", "check any torch optimizer for what training programs rely on"),
}
"""Module in mp_optim.apps, and meaning, of each command. The module's ``main(arguments)`` returns
the exit status."""
WIDE = 10_000
_PACKAGES = {"yaml": "pyyaml"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit status.

    Args:
        arguments: name and arguments of the command; None for the arguments of this process.

    Raises:
        SystemExit: help was printed (0), or the arguments are invalid (2).
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name not in COMMANDS:
        description = "Commands of mp_optim. mp-optim COMMAND --help says more."
        parser = argparse.ArgumentParser(prog="mp-optim", description=description)
        commands = parser.add_subparsers(metavar="COMMAND", required=True)
        for known, (_, what) in COMMANDS.items():
            commands.add_parser(known, help=what)
        parser.parse_args([name, *rest])
    module = f"mp_optim.apps.{COMMANDS[name][0]}"
    return status_of(lambda: importlib.import_module(module).main(rest))


def status_of(command: Callable[[], int]) -> int:
    """Run a command, and return its exit status.

    An input error is printed as one sentence on stderr, with status 1. The status is 130 after
    Ctrl-C and 141 after a closed pipe, as a shell reports these signals.
    """
    try:
        status = command()
        sys.stdout.flush()
        return status
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "mp_optim":
            raise
        # transformers raises an error without a module name if it cannot import one of its own
        # models, so print the first cause.
        if error.name is None:
            return _fail(f"{_sentence(error)} The cause: {_sentence(_first_cause(error))}")
        package = _PACKAGES.get(str(error.name), error.name)
        return _fail(f"this command needs {error.name}: pip install {package}")
    except BrokenPipeError:
        # Python flushes stdout again at its exit, and would print an error for the closed pipe. So
        # stdout is redirected.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        is_named = error.filename is not None and error.strerror is not None
        return _fail(f"{error.filename}: {error.strerror}" if is_named else str(error))
    except (ValueError, TypeError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _first_cause(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _sentence(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _fail(sentence: str) -> int:
    first_paragraph = sentence.partition("\n\n")[0]
    print(f"mp-optim: {first_paragraph}", file=sys.stderr)
    return 1


def hf_config(path: Path) -> Any:
    """Return the ``transformers`` config of a file or folder.

    Raises:
        FileNotFoundError: the file or folder does not exist.
        ValueError: transformers cannot read the config.
    """
    # transformers would look up a missing path as a name on the Hub, so the path is checked first.
    if not path.exists():
        raise FileNotFoundError(f"--model {path}: no such file or folder; correct the path")
    import transformers

    with model_errors(str(path)):
        return transformers.AutoConfig.from_pretrained(path)


@contextmanager
def model_errors(model: str) -> Iterator[None]:
    """Raise ValueError with the model's name if transformers cannot build it from its config."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model}: {error}") from error
    except Exception as error:
        reason = _sentence(_first_cause(error)).rstrip(".")
        raise ValueError(
            f"--model {model}: transformers cannot build the model: {reason}; correct the config"
        ) from error


def console() -> Console:
    """Return a console for stdout that is as wide as the terminal. In a pipe or file the console
    is as wide as the tables need."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE)
