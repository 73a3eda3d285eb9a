"""Write golden values: `PYTHONPATH=tests:tools python -m support.regenerate [case...]`."""

import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path

import torch

from support.functional import CASES, Curve, case_names, load_case, load_golden, run_case


def finite(curve: Curve) -> Curve:
    norms = [
        norm if norm is not None and math.isfinite(norm) else None for norm in curve.grad_norms
    ]
    return dataclasses.replace(curve, grad_norms=norms)


def regenerate(name: str) -> str:
    """Train the case and write its golden values, unless another case holds them; return a report
    line."""
    _, options = load_case(name)
    with tempfile.TemporaryDirectory() as folder:
        curve = finite(run_case(name, Path(folder)))
    if options.same_as is not None:
        same = curve == load_golden(options.same_as)
        return f"{name}: {'equals' if same else 'DIFFERS FROM'} {options.same_as}"
    values = {"torch": torch.__version__.partition("+")[0], "curve": dataclasses.asdict(curve)}
    (CASES / name / "golden_values.json").write_text(
        json.dumps(values, indent=1) + "\n", encoding="utf-8"
    )
    first, last = curve.losses[0], curve.losses[-1]
    return f"{name}: loss {first:.4f} -> {last:.4f}, {sum(curve.skipped)} skipped"


def main(names: list[str]) -> None:
    """Regenerate cases with golden values first, then the cases that repeat them."""
    unknown = set(names) - set(case_names())
    if unknown:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(case_names())}")
    for name in sorted(names or case_names(), key=lambda n: load_case(n)[1].same_as is not None):
        print(regenerate(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
