"""How the commands talk to a shell: errors as sentences, tables that survive a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 10_000
_PACKAGES = {"yaml": "pyyaml"}


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
        return _fail(_about_file(error))
    except (ValueError, TypeError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _fail(sentence: str) -> int:
    first_paragraph = sentence.partition("\n\n")[0]
    print(f"mp-optim: {first_paragraph}", file=sys.stderr)
    return 1


def _about_file(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def console() -> Console:
    """Stdout: as wide as the terminal, or, in a pipe or file, as the tables need."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDE)
