"""The model's values in full precision, out of a checkpoint of Megatron's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mp_optim.precision import MegatronOptimizer
from mp_optim.slots.names import matched_names

_CHUNK = re.compile(r"model(\d+)$")


def values_by_name(
    stack: MegatronOptimizer, state_dict: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a model's state dict under the names that a stack has for them.

    Args:
        state_dict: with ``model`` (or ``model0``, ``model1`` ... for virtual stages), or the names
            themselves.
    """
    named: dict[str, Any] = dict(state_dict)
    if isinstance(state_dict.get("model"), Mapping):
        named = dict(state_dict["model"])
    elif chunks := [key for key in state_dict if _CHUNK.match(key)]:
        named = {
            f"{key.removeprefix('model')}.{name}": value
            for key in chunks
            for name, value in state_dict[key].items()
        }
    known = [stack.slot_name(slot) for slot in stack.slots()]
    called = matched_names(named, known)
    return {
        called[key]: value for key, value in named.items() if isinstance(value, Tensor)
    }
