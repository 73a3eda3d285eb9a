"""State dicts and checkpoints on disk."""

from mp_optim.checkpoint.background import SaveHandle
from mp_optim.checkpoint.export import export_safetensors
from mp_optim.checkpoint.flat import FlatShard
from mp_optim.checkpoint.save_load import load, save, verify, versions

__all__ = [
    "FlatShard",
    "SaveHandle",
    "export_safetensors",
    "load",
    "save",
    "verify",
    "versions",
]
