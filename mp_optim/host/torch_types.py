"""Type checks for torch's classes without importing the modules of these classes.

Importing ``torch.distributed.tensor`` takes about as long as importing torch. A value can be an
instance of a class only if the class's module was imported. So programs without DTensors never
import the module.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """True if a value is a DTensor."""
    return isinstance(value, _class_if_loaded("torch.distributed.tensor", "DTensor"))


def is_sharded_tensor(value: object) -> TypeIs[ShardedTensor]:
    """True if a value is a ShardedTensor, torch's class for shards before DTensor."""
    module = "torch.distributed._shard.sharded_tensor"
    return isinstance(value, _class_if_loaded(module, "ShardedTensor"))


def _class_if_loaded(module: str, name: str) -> type | tuple[()]:
    # The class is also missing while another thread is importing the module, so use a default.
    found: type | tuple[()] = getattr(sys.modules.get(module), name, ())
    return found
