#!/usr/bin/env python
"""Count habits that make text hard to read, per 1,000 words of each kind of text.

python tools/check_prose.py             # rates against their ceilings; status 1 if one is exceeded
python tools/check_prose.py --worst 20  # and the passages with most habits, by file and line

Kinds of text: docstrings, comments and error messages of the package, docstrings and names of
tests, and the documents. CONTRIBUTING.md has the rules, with examples.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = {
    "docstrings": 1.3,
    "comments": 1.0,
    "errors": 0.3,
    "test docstrings": 0.3,
    "test names": 0.0,
    "documents": 0.8,
}
"""Habits per 1,000 words (test names: per 1,000 names) that each kind may have. Only lower them."""

_LINKS = r"of|for|from|to|by|with|in|on|as|than|and|but|or|is|are|be"
HABITS = {
    "what, who as a noun": rf"(?:^|[.;:,(] ?|\b(?:{_LINKS}) )(?:what|who)(?:ever)?\b"
    r"(?! (?:to|if|about|for|kind)\b)",
    "somebody, nobody": r"\b(?:some|no|any|every)body\b|\b(?:someone|something) else\b",
    "beside, anew, but for": r"\b(?:beside|anew|but for|so (?:many|much)|as much again)\b",
    "of which, whose": r"\b(?:(?:of|from|by) which|of whom|of what|whose)\b",
    "lies, rests, travels": r"\b(?:lies?|lay|lain|lying|rests?|rested|travels?|travell?ed)\b",
    "told, said, asked": r"\b(?:told|tells|says|(?:is|are) (?:said|asked)|believe[sd]?)\b",
    "there is": r"(?:^|[.;:] )there (?:is|are|was|were)\b",
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in HABITS.items()}
_STARTS = re.compile(r"(?:What|Who|Whoever|Of|Where|How|Those|The same|As)\b")
_TWO_ARGUMENTS = re.compile(r"^ {4,}\w+, \w+: ", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.:;!?])\s+|\n\s*\n")
_LONGEST = 30
_RIDDLE = re.compile(r"test_(?:what|who|whoever|nothing|it|they|the|an?|one|no|each|all|those)_")


@dataclass(frozen=True)
class Passage:
    """A text with its place.

    Attributes:
        kind: a key of :data:`CEILINGS`.
        is_public: a docstring that readers of the API reference see.
    """

    kind: str
    path: Path
    line: int
    text: str
    is_public: bool = False


def passages(root: Path = ROOT) -> Iterator[Passage]:
    """Yield every text of the package, the tests and the documents."""
    for path in sorted((root / "mp_optim").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield from _docstrings(path, text, "docstrings")
        yield from _errors(path, text)
        yield from _comments(path, text)
    for path in sorted((root / "tests").rglob("*.py")):
        yield from _docstrings(path, path.read_text(encoding="utf-8"), "test docstrings")
    for path in [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]:
        yield from _documents(path)


def _docstrings(path: Path, text: str, kind: str) -> Iterator[Passage]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = getattr(node, "name", "")
        if name.startswith("test_"):
            yield Passage("test names", path, node.lineno, name)  # type: ignore[union-attr]
        if doc := ast.get_docstring(node):
            is_public = bool(name) and not name.startswith("_")
            yield Passage(kind, path, getattr(node, "lineno", 1), doc, is_public)


def _errors(path: Path, text: str) -> Iterator[Passage]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            said = "".join(
                part.value
                for argument in node.exc.args
                for part in ast.walk(argument)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
            if said:
                yield Passage("errors", path, node.lineno, said)


def _comments(path: Path, text: str) -> Iterator[Passage]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and len(token.string) > 12:
            yield Passage("comments", path, token.start[0], token.string.lstrip("# "))


def _documents(path: Path) -> Iterator[Passage]:
    in_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and line.strip():
            yield Passage("documents", path, number, line)


def habits_of(passage: Passage) -> Counter[str]:
    """Count the habits of one passage by name."""
    if passage.kind == "test names":
        return Counter({"riddle": 1} if _RIDDLE.match(passage.text) else {})
    text = passage.text
    found = Counter({name: len(rx.findall(text)) for name, rx in _PATTERNS.items()})
    if "docstrings" in passage.kind:
        found["starts with What, Of, ..."] = int(bool(_STARTS.match(text)))
        found["two arguments on a line"] = len(_TWO_ARGUMENTS.findall(text))
    if passage.kind != "errors":
        sentences = _SENTENCE_END.split(text)
        found["long sentence"] = sum(len(one.split()) > _LONGEST for one in sentences)
    return +found


@dataclass(frozen=True)
class Rate:
    """Habits per 1,000 words of one kind of text; of names, per 1,000 names."""

    kind: str
    words: int
    habits: Counter[str]

    @property
    def total(self) -> float:
        return 1000 * sum(self.habits.values()) / max(self.words, 1)


def rates(texts: Iterable[Passage]) -> list[Rate]:
    words: Counter[str] = Counter()
    habits: dict[str, Counter[str]] = defaultdict(Counter)
    for passage in texts:
        is_name = passage.kind == "test names"
        words[passage.kind] += 1 if is_name else len(passage.text.split())
        habits[passage.kind] += habits_of(passage)
    return [Rate(kind, words[kind], habits[kind]) for kind in CEILINGS]


def exceeded(found: Iterable[Rate]) -> list[str]:
    """Return a sentence for each kind of text that is over its ceiling."""
    return [
        f"{rate.kind}: {rate.total:.1f} habits per 1,000 words; the ceiling is "
        f"{CEILINGS[rate.kind]}: rewrite what you added (--worst 20 lists passages)"
        for rate in found
        if rate.total > CEILINGS[rate.kind]
    ]


def main() -> int:
    """Print the rates; return 1 if one exceeds its ceiling."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="passages to print")
    options = parser.parse_args()
    texts = list(passages())
    found = rates(texts)
    for rate in found:
        common = ", ".join(f"{name} {count}" for name, count in rate.habits.most_common())
        ceiling = CEILINGS[rate.kind]
        print(f"{rate.kind}: {rate.total:.1f} of {ceiling} ({rate.words:,} words: {common})")
    scored = [(sum(habits_of(one).values()) / (len(one.text.split()) + 8), one) for one in texts]
    for score, one in sorted(scored, key=lambda pair: -pair[0])[: options.worst]:
        place = one.path.relative_to(ROOT)
        print(f"{place}:{one.line}: {score:.2f} {' '.join(one.text.split())[:140]}")
    sentences = exceeded(found)
    print("\n".join(sentences), file=sys.stderr, end="\n" if sentences else "")
    return int(bool(sentences))


if __name__ == "__main__":
    sys.exit(main())
