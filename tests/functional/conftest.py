"""Makes the trainer of `tools/` and the modules of this folder importable."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
for _folder in (_HERE, _HERE.parents[1] / "tools"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
