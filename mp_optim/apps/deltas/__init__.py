"""The receiver of weight deltas: give a copy of a model the published values."""

from mp_optim.apps.deltas.receiver import Position, apply_delta

__all__ = ["Position", "apply_delta"]
