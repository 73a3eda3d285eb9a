"""Names that other torch versions must have, and an environment without numpy."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
WITHOUT_NUMPY = """
import runpy, sys
sys.modules["numpy"] = None
runpy.run_path("tools/versions_smoke.py", run_name="__main__")
"""

IMPORTED = """
import sys, torch
before = {*sys.modules}
import mp_optim
print(*({*sys.modules} - before))
"""
HEAVY = {
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed._shard",
    "torch.fx.experimental.symbolic_shapes",
    "numpy",
    "safetensors",
    "sympy",
    "transformers",
    "triton",
}
"""Modules that are slow to import. Programs that do not use them must not load them."""


def test_import_loads_no_heavy_modules():
    command = [sys.executable, "-c", IMPORTED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    loaded = {*run.stdout.split()}
    assert "mp_optim.optimizers.classes" in loaded and HEAVY & loaded == set()


def test_package_trains_when_numpy_is_missing():
    """torch requires numpy for several ranks only, so training on one rank must work without
    numpy."""
    command = [sys.executable, "-c", WITHOUT_NUMPY]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "without numpy" in run.stdout and "all of it works" in run.stdout


def torch_names(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("torch.") and name.replace(".", "").isidentifier():
                found.add(name)
    return found


def test_package_uses_only_torch_names_listed_for_the_oldest_torch():
    """tools/torch_names.txt lists the names, and tools/versions_smoke.py looks up each name in
    every torch. Add a new name to the list, and run
    ``bash tools/test_versions.sh "3.10 2.6.0 no"``."""
    known = set((ROOT / "tools/torch_names.txt").read_text().split())
    modules = (ROOT / "mp_optim").rglob("*.py")
    taken = set().union(*(torch_names(ast.parse(path.read_text())) for path in modules))
    assert taken - known == set()
    assert known - taken == set(), "no longer used"


def test_versions_page_lists_every_private_torch_name_in_use():
    page = (ROOT / "docs/versions.md").read_text()
    for name in (ROOT / "tools/torch_names.txt").read_text().split():
        last = name.rpartition(".")[2]
        if "._" in name and not last.startswith("_foreach") and name.count(".") > 1:
            assert last in page, name
