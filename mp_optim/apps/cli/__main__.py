"""Entry point of ``python -m mp_optim.apps.cli``, equal to the command ``mp-optim``."""

import sys

from mp_optim.apps.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
