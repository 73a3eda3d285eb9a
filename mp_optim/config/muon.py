"""Muon's settings as numbers: the polynomials of its Newton-Schulz iteration, and the scale of its
steps."""

from __future__ import annotations

import math

Polynomial = tuple[float, float, float]
"""(a, b, c) of one step: X <- a X + b (X X^T) X + c (X X^T)^2 X."""

_POLYNOMIALS: dict[str, tuple[Polynomial, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""simple: one polynomial for all steps (Jordan 2024, https://kellerjordan.github.io/posts/muon/;
torch.optim.Muon's). quintic: five, made to follow each other (Cesista,
https://leloykun.github.io/ponder/muon-opt-coeffs/). polar_express: the best next one after those
before (Amsel et al. 2025, arXiv:2505.16932), the last for all that follow.
"""

COEFFICIENT_TYPES = tuple(_POLYNOMIALS)
NS_METHODS = ("standard", "gram")
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")
MATMUL_PRECISIONS = ("medium", "highest")
TP_MODES = ("duplicated", "blockwise")
SCALAR_OPTIMIZERS = ("adam", "lion")


def coefficients(kind: str, steps: int) -> tuple[Polynomial, ...]:
    """The polynomial of each step.

    Raises:
        ValueError: ``steps`` is not a number of steps that the polynomials are made for.
    """
    table = _POLYNOMIALS[kind]
    if steps < 1 or steps != int(steps):
        raise ValueError(f"num_ns_steps={steps!r}: must be a whole number >= 1")
    if kind == "quintic" and steps % len(table):
        raise ValueError(
            f"num_ns_steps={steps!r}: coefficient_type='quintic' is {len(table)} polynomials that "
            "follow "
            "each other; take a multiple of that, or coefficient_type='simple' or 'polar_express'"
        )
    if kind == "polar_express":
        return table[:steps] + table[-1:] * (steps - len(table))
    return table * (steps // len(table))


def scale_factor(mode: str, rows: int, columns: int) -> float:
    """What an orthogonal step of a (rows, columns) = (out, in) matrix is multiplied with.

    spectral: sqrt(max(rows, columns)), which gives elements an RMS of one for any shape (Liu et al.
    2025, arXiv:2502.16982, who multiply 0.2 with it to come near AdamW's). unit_rms_norm: sqrt(rows
    / columns), which gives the map from RMS to RMS norm 1 (Pethick et al. 2025, arXiv:2502.07529).
    shape_scaling: sqrt(max(1, rows / columns)) (Jordan 2024).
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns, 1))
    ratio = rows / max(columns, 1)
    return math.sqrt(ratio if mode == "unit_rms_norm" else max(1.0, ratio))
