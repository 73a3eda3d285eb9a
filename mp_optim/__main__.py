"""``python -m mp_optim``: the same as ``mp-optim``."""

import sys

from mp_optim.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
