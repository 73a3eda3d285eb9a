"""``python -m mp_optim.megatron SCRIPT ARGS``: run a Megatron program with this optimizer."""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
from pathlib import Path
from typing import Any

from mp_optim.apps.megatron.install import install


def main() -> None:
    """Call :func:`install` with the fields of ``--set``, and run the script of the command line."""
    parser = argparse.ArgumentParser("python -m mp_optim.megatron", description=__doc__)
    parser.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        type=_setting,
        help="a field of mp_optim.OptimizerConfig that Megatron has no argument for, such as "
        "offload_mode=speculative; may be given several times",
    )
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    install(**dict(options.set))
    runpy.run_path(options.script, run_name="__main__")


def _setting(text: str) -> tuple[str, Any]:
    """Return the field's name and its value. The value is a Python literal, or else the text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no equals sign; write FIELD=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


if __name__ == "__main__":
    main()
