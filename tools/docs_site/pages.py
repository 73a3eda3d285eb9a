"""A hook of mkdocs: files outside docs/ that pages link to are pages of the site, too: the programs
of tools/examples, CONTRIBUTING.md, CHANGELOG.md, SECURITY.md and the notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/finetune.ipynb": "finetune.ipynb",
}
"""Files of the repository, and their names on the site."""
_OUTSIDE = re.compile(rf"\]\(((?:\.\./)*)\.\./({'|'.join(map(re.escape, OUTSIDE))})")
_PROGRAM = re.compile(r"\]\(((?:\.\./)*)\.\./tools/examples/(\w+)\.py")


def on_files(files: Files, config: Any) -> Files:
    """Add the files, with links as seen from docs/."""
    for path, name in OUTSIDE.items():
        text = (ROOT / path).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    for program in (ROOT / "tools" / "examples").glob("*.py"):
        code = program.read_text(encoding="utf-8")
        text = f"# {program.name}\n\n```python\n{code}```\n"
        files.append(File.generated(config, f"programs/{program.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Return a page's text with links to the files that point to the pages on the site."""
    markdown = _OUTSIDE.sub(lambda match: f"]({match[1]}{OUTSIDE[match[2]]}", markdown)
    return _PROGRAM.sub(lambda match: f"]({match[1]}programs/{match[2]}.md", markdown)
