"""Checkpoints on disk: save, load and export of models and optimizers."""

from mp_optim.checkpoint.commit import versions
from mp_optim.checkpoint.export import export_safetensors
from mp_optim.checkpoint.save_load import SaveHandle, load, save, verify
from mp_optim.core.flat_shard import FlatShard

__all__ = ["FlatShard", "SaveHandle", "export_safetensors", "load", "save", "verify", "versions"]
