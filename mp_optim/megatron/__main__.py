"""``python -m mp_optim.megatron SCRIPT ARGS``: a program of Megatron's, with this optimizer."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from mp_optim.megatron.install import install


def main() -> None:
    """Run the script that the arguments begin with."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m mp_optim.megatron SCRIPT ARGS")
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
