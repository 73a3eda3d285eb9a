"""Notices gradients that somebody else has clipped before they came here."""

from __future__ import annotations

from mp_optim.process.caller_warnings import warn

_IN_A_ROW = 5
_ALIKE = 1e-3
"""Relative: what rounding a clipped gradient to bfloat16 changes in its norm is less."""


class ClippedBefore:
    """Norms of the last steps. Nobody's gradients have the same norm again and again but those that
    were scaled to it; constant ones, of a test or a benchmark, have it to the last bit."""

    def __init__(self) -> None:
        self._norms: list[float] = []
        self._said = False

    def see(self, norm: float | None, limit: float) -> None:
        """Warn, once, if some steps in a row came with one norm, and would be clipped again.

        Args:
            norm: of a step, before it was clipped. limit: ``clip_grad`` of the config.
        """
        if self._said or norm is None or not 0.0 < norm <= limit * (1.0 + _ALIKE):
            self._norms.clear()
            return
        self._norms = [*self._norms[1 - _IN_A_ROW :], norm]
        low, high = min(self._norms), max(self._norms)
        if len(self._norms) < _IN_A_ROW or not low < high <= low * (1.0 + _ALIKE):
            return
        self._said = True
        warn(
            f"the gradient norm was {norm:.4g} in {_IN_A_ROW} steps in a row, so something clips "
            f"gradients before the optimizer clips them to {limit:g}. Clip in one place: here, and "
            "no max_grad_norm, gradient_clip_val or clip_grad_norm_ there (0 for the HF Trainer); "
            "or there, and clip_grad=0 in OptimizerConfig (max_grad_norm=None)"
        )
