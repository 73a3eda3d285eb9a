"""State dicts and checkpoints on disk."""

from mp_optim.checkpoint.save_load import load, save

__all__ = ["load", "save"]
