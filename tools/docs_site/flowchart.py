"""A hook of mkdocs: Mermaid flowcharts are drawn when the site is built, so that a reader's browser
fetches no program for it.

Takes what tools/draw_layers.py writes: ``name["label"]`` and ``name --> other``, without circles.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping

WIDTH, HEIGHT, GAP_X, GAP_Y = 118, 30, 24, 30
_MARKER = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
)

Point = tuple[float, float]
Arrows = list[tuple[str, str]]


def on_page_markdown(markdown: str, **context: object) -> str:
    """A page with its flowcharts as pictures."""
    return re.sub(
        r"```mermaid\nflowchart TD\n(.*?)```",
        lambda match: drawn(match[1]),
        markdown,
        flags=re.DOTALL,
    )


def drawn(chart: str) -> str:
    """A flowchart as SVG: below each box what it points to."""
    labels = dict(re.findall(r'^ *(\w+)\["(.*?)"\]$', chart, re.MULTILINE))
    arrows = re.findall(r"^ *(\w+) --> (\w+)$", chart, re.MULTILINE)
    row = rows_of(labels, arrows)
    column = columns_of(row, arrows)
    first = min(column.values())
    places = {
        name: ((column[name] - first) * (WIDTH + GAP_X) + 1, row[name] * (HEIGHT + GAP_Y) + 1)
        for name in labels
    }
    width = max(x for x, _ in places.values()) + WIDTH + 1
    height = max(y for _, y in places.values()) + HEIGHT + 1
    parts = [_MARKER, *(_arrow(places[one], places[other]) for one, other in arrows)]
    parts += [_box(places[name], label) for name, label in labels.items()]
    return (
        f'<svg class="flowchart" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'
    )


def rows_of(names: Iterable[str], arrows: Arrows) -> dict[str, int]:
    """Which row a box is in: as high as can be below all that point to it."""
    row = dict.fromkeys(names, 0)
    for _ in row:
        for one, other in arrows:
            row[other] = max(row[other], row[one] + 1)
    return row


def columns_of(row_of: Mapping[str, int], arrows: Arrows) -> dict[str, int]:
    """Which column a box is in: 0 for the one of its row that most arrows meet; at the left those
    from which none goes on, so that long arrows have the right; else right and left in turn."""
    ways = Counter(name for arrow in arrows for name in arrow)
    below = {name: [to for one, to in arrows if one == name] for name in row_of}
    column: dict[str, int] = {}

    def order(name: str) -> tuple[int, ...]:
        lengths = [row_of[to] - row_of[name] for to in below[name]]
        sides = [column[to] for to in below[name]]
        return -ways[name], max(lengths, default=0), *sides

    for row in range(max(row_of.values()), -1, -1):
        members = sorted((name for name in row_of if row_of[name] == row), key=order)
        for count, name in enumerate(members):
            goes_right = count % 2 == 1 and below[name]
            column[name] = (count + 1) // 2 * (1 if goes_right else -1)
    return column


def _arrow(start: Point, end: Point) -> str:
    x1, y1 = start[0] + WIDTH / 2, start[1] + HEIGHT
    x2, y2 = end[0] + WIDTH / 2, end[1]
    bend = y2 - GAP_Y / 2  # straight down beside the boxes between, then over
    return (
        f'<path d="M{x1} {y1}V{bend - GAP_Y / 2}C{x1} {bend} {x2} {bend - GAP_Y / 2} {x2} {y2}" '
        'marker-end="url(#arrow)"/>'
    )


def _box(corner: Point, label: str) -> str:
    x, y = corner
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>'
        f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT / 2 + 4}">{html.escape(label)}</text>'
    )
