"""What the documents say exists, and what they tell people to type works."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@each_document
def test_named_tests_exist(document):
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", document.read_text()))
    assert {name for name in named if f"def {name}(" not in sources} == set()


@each_document
def test_links_and_files_exist(document):
    text = document.read_text()
    linked = [document.parent / link for link in re.findall(r"\]\((?!http|#)([^)#]+)", text)]
    named = [ROOT / path for path in re.findall(r"`((?:docs|mp_optim|tests|tools)/[\w/.]+\.\w+)`", text)]
    assert [path for path in (*linked, *named) if not path.exists()] == []


def test_the_readme_example_runs():
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    model = nn.Linear(4, 4).bfloat16()
    loss = model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()
    names = {"model": model, "loss": loss}
    exec(snippet, names)
    assert names["success"] and names["grad_norm"] > 0
