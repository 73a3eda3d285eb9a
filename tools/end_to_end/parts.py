"""The parts, in the order of their worth."""

from __future__ import annotations

from end_to_end import part_a, part_b, part_c, part_d, part_e
from end_to_end.rows import Part, Row

CARD = Part(
    "The card",
    lambda sizes: [Row("rates", "measure:card", {"rounds": 1 if sizes.miniature else 5}, 60)],
    {"tflops": "TFLOPS, 8192 x 8192 bf16 matmul", "bus_each_way": "GB/s each way, both busy"},
    0.3,
)
PARTS: dict[str, Part] = {
    **{"card": CARD, "D": part_d.PART, "A": part_a.PART},
    **{"B": part_b.PART, "E": part_e.PART, "C": part_c.PART},
}
"""``card`` is run before any other part; its matmul rate is the unit of the others."""
