"""What was carried out: the texts of a trial, over how many elements, and what was wrong. A text
that several targets have is carried out once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ptx.forms import Form, form_of
from ptx.parser import parse
from ptx.triton_driver import Launch

SHOWN = 12
"""Letters of a digest."""


def text_of(launch: Launch) -> str:
    """A digest of what is carried out: all of a kernel's text but its target, comments and line
    numbers, and how many threads and bytes a block has."""
    program = parse(launch.function.ptx)
    parts = [str(program.params), str(program.kinds), str(program.depot)]
    parts += [f"{one.text} {one.guard} {one.negated} {one.target}" for one in program.instructions]
    parts += [str(launch.warps), str(launch.shared)]
    return _digest(parts)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:SHOWN]


@dataclass(frozen=True)
class Executed:
    """A trial's texts on the machine.

    Attributes:
        texts: a digest of all of them.
        elements: of tensors, counted in each launch.
        differing: elements of other bits than reference's.
        error: what the machine refused; empty if nothing.
        arch: target that they were compiled for; others may have the same.
    """

    trial: str
    texts: str
    elements: int
    differing: int
    error: str
    arch: int
    seconds: float


@dataclass
class OnTarget:
    """What a target launches: texts by form, and what carried them out, by trial."""

    texts: dict[Form, str] = field(default_factory=dict)
    executed: list[Executed] = field(default_factory=list)

    def note(self, launches: Iterable[Launch]) -> str:
        """Returns a digest of the texts of launches."""
        found = {form_of(launch): text_of(launch) for launch in launches}
        self.texts.update(found)
        return _digest(sorted(set(found.values())))


class Results:
    """All that was carried out, by trial and texts."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Executed] = {}

    def of(self, trial: str, texts: str, elements: int) -> Executed | None:
        """What is known of texts that were carried out over so many elements, without a fault."""
        found = self._rows.get((trial, texts))
        is_right = found is not None and not found.differing and not found.error
        return found if is_right and found is not None and found.elements >= elements else None

    def add(self, done: Executed) -> None:
        self._rows[done.trial, done.texts] = done


def table(targets: dict[int, OnTarget]) -> Iterator[str]:
    """Lines of Markdown: what each target launches, and what was carried out."""
    yield "| | forms | texts | of these its own | trials | elements, millions | differ | refused |"
    yield "|---" * 8 + "|"
    seen: set[str] = set()
    for arch, found in targets.items():
        texts = set(found.texts.values())
        done = found.executed
        yield (
            f"| sm_{arch} | {len(found.texts)} | {len(texts)} | {len(texts - seen)} | {len(done)} "
            f"| {sum(each.elements for each in done) / 1e6:.0f} "
            f"| {sum(each.differing for each in done)} "
            f"| {sum(bool(each.error) for each in done)} |"
        )
        seen |= texts
