"""Receiver of weight deltas: writes published values to a copy of a model."""

from mp_optim.apps.deltas.receiver import Position, apply_delta

__all__ = ["Position", "apply_delta"]
