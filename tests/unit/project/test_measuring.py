"""The tools that count: a package and a walk with known figures."""

from __future__ import annotations

import json
from pathlib import Path

import measure_code

from support.launch import run_forked_program

FILES = {
    "__init__.py": "from mp_optim.rules.plain import Rule\n",
    "apps/tool.py": '"""A tool."""\n\n\ndef main(): ...  # a comment\n',
    "rules/plain.py": "class Rule:\n    # why\n    def apply(self):\n        'Text.'\n",
}


def test_measure_code_counts_code_without_docstrings_and_comments(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "mp_optim" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    figures = measure_code.measure(tmp_path)
    assert figures["lines of code"] == "4" and figures["lines of code outside apps"] == "3"
    assert figures["lines"] == "9" and figures["files"] == "3"
    assert figures["classes"] == "1" and figures["functions"] == "2"


def test_profile_step_counts_functions_of_the_package_in_every_thread() -> None:
    built = json.loads(run_forked_program("tools/measuring/passes.py", "build"))
    first, second = built.values()
    assert first["calls"] > second["calls"] > second["functions"] >= second["files"] > 1
    assert second["deepest"] > 1
    (stepped,) = json.loads(run_forked_program("tools/measuring/passes.py", "step")).values()
    assert stepped["functions"] < second["functions"]
