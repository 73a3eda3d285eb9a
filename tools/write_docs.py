#!/usr/bin/env python
"""Write the generated parts of README.md and docs/, so that they render without a build.

python tools/write_docs.py            # write programs, tables, hardware status, API reference
python tools/write_docs.py --count    # print the pages and their words, without generated parts
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import api_reference
import megatron_fields
import tyro

from ptx import record

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "tools" / "examples"
END = "<!-- end -->"
_PROGRAM = re.compile(rf"(<!-- program: (\w+\.py) -->\n).*?({END})", re.DOTALL)
_TABLE = re.compile(rf"(<!-- table: megatron_fields -->\n).*?({END})", re.DOTALL)
_GENERATED = re.compile(rf"<!-- \w+: [^>]+ -->.*?{END}", re.DOTALL)


def page(text: str) -> str:
    """Return a page's text with its generated parts up to date."""
    text = _PROGRAM.sub(lambda match: match[1] + _block(match[2]) + match[3], text)
    table = "\n".join(megatron_fields.table())
    text = _TABLE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", text)
    return record.page(api_reference.page(text))


def _block(name: str) -> str:
    program = (EXAMPLES / name).read_text(encoding="utf-8")
    return f'\n```python title="tools/examples/{name}"\n{program}```\n\n'


def words_of(text: str) -> int:
    """Return the number of words of a page without its generated parts."""
    return len(_GENERATED.sub("", text).split())


@dataclass(frozen=True)
class Options:
    """Write the generated parts of README.md and docs/."""

    count: bool = False
    """Print the pages and their words instead, without generated parts."""


def main(options: Options) -> None:
    pages = [path for path in record.pages() if path.parent.name != "upstream-reports"]
    if options.count:
        counts = {path.relative_to(ROOT): words_of(path.read_text("utf-8")) for path in pages}
        for path, count in sorted(counts.items(), key=lambda item: item[1]):
            print(f"{count:6,} {path}")
        print(f"{sum(counts.values()):6,} words on {len(counts)} pages")
        return
    for path in pages:
        before = path.read_text("utf-8")
        if (after := page(before)) != before:
            path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options))
