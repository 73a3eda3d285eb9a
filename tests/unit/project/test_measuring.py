"""The tools that count what there is to read: a package and a walk whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path

import measure_code

from support.launch import run_forked_program

FILES = {
    "__init__.py": "from mp_optim.below import Base as Exported\n",
    "below.py": "import torch\n\n\nclass Base(torch.optim.Optimizer):\n    def step(self): ...\n",
    "above.py": (
        "from typing import Protocol\n\nfrom mp_optim import Exported\n\n\n"
        "class Kind(Protocol):\n    def of(self): ...\n\n\n"
        "class Base(Exported):\n    def step(self): ...\n\n    def close(self): ...\n"
    ),
    "rules/plain.py": "class Rule:\n    def apply(self): ...\n\n    def scale(self): ...\n",
}


def test_classes_are_followed_through_imports_and_namesakes(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "mp_optim" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = sorted(tmp_path.rglob("*.py"))
    figures = measure_code.Figures()
    measure_code.count_classes([measure_code.Module.read(path) for path in paths], figures)
    assert figures.values == {
        "lines of Python": str(sum(text.count("\n") for text in FILES.values())),
        "lines of code": "14",
        "files": "4",
        "classes": "4",
        "functions": "6",
        "Protocols": "1",
        "deepest inheritance of what steps": "2 (Base < Base)",
        "methods on the widest rule": "2 (Rule)",
        "methods on the widest class": "2 (Base)",
    }


def test_a_walk_counts_functions_of_the_package_in_every_thread() -> None:
    built = json.loads(run_forked_program("tools/measuring/passes.py", "build"))
    first, second = built.values()
    assert first["calls"] > second["calls"] > second["functions"] >= second["files"] > 1
    assert second["deepest"] > 1
    (stepped,) = json.loads(run_forked_program("tools/measuring/passes.py", "step")).values()
    assert stepped["functions"] < second["functions"]
