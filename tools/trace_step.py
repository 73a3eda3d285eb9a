#!/usr/bin/env python
"""The same as ``mp-optim trace``.

python tools/trace_step.py --mode speculative --output runs/trace
"""

import sys

from mp_optim.cli.command import main

if __name__ == "__main__":
    sys.exit(main(["trace", *sys.argv[1:]]))
