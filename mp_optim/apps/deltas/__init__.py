"""Receiver of weight deltas, which writes published values to a copy of a model, and publications
in the layouts of engines."""

from mp_optim.apps.deltas.disk_version import save_disk_version
from mp_optim.apps.deltas.publications import Position
from mp_optim.apps.deltas.quantized import DeltaQuantizer, quantized_weights
from mp_optim.apps.deltas.receiver import apply_delta
from mp_optim.apps.deltas.skyrl_version import save_skyrl_version
from mp_optim.apps.deltas.verl_updates import verl_entries, verl_flushes

__all__ = [
    "DeltaQuantizer",
    "Position",
    "apply_delta",
    "quantized_weights",
    "save_disk_version",
    "save_skyrl_version",
    "verl_entries",
    "verl_flushes",
]
