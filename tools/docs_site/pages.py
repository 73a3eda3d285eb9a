"""A hook of mkdocs: what lies beside docs/ and is linked there, CONTRIBUTING.md, CHANGELOG.md and
the notebook, is part of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BESIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/finetune.ipynb": "finetune.ipynb",
}
"""Files of the repository, and what they are called on the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add them, with links as seen from docs/."""
    for path, name in BESIDE.items():
        text = (ROOT / path).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Links to them, as seen from docs/, stay on the site."""

    def page_of(match: re.Match[str]) -> str:
        return f"]({match[1]}{BESIDE[match[2]]}"

    return re.sub(rf"\]\(((?:\.\./)*)\.\./({'|'.join(BESIDE)})", page_of, markdown)
