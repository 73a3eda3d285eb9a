"""Megatron's own program with this optimizer, by one line: :func:`install`, before ``pretrain``.

Or ``python -m mp_optim.megatron pretrain_gpt.py ARGS``. Nothing here is imported without Megatron.
"""

from mp_optim.megatron.config import config_from_megatron
from mp_optim.megatron.face import MegatronFace
from mp_optim.megatron.install import get_megatron_optimizer, install, uninstall

__all__ = [
    "MegatronFace",
    "config_from_megatron",
    "get_megatron_optimizer",
    "install",
    "uninstall",
]
