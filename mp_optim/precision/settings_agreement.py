"""Ranks that hold parts of the same parameters compare what they step them with.

Here it is put into a number; :func:`~mp_optim.precision.measure.agree` compares the numbers, in the
reduction of the norm.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from mp_optim.precision.measure import NormKey
from mp_optim.ranks.agreement import difference_told
from mp_optim.slots import ParamGroups, Slot, slot_name
from mp_optim.slots.tensor_layout import ranks_of_copies

_NOT_COMPARED = ("params", "param_names", "fqns")
_OF_CONFIG = (
    "optimizer",
    "clip_grad",
    "grad_norm_skip_threshold",
    "skip_step_sigma_factor",
    "skip_step_rolling_interval_length",
)


class SettingsAlike:
    """What this rank would step its parts of split parameters with.

    Args:
        slots, params, keys: of the model's parameters, as parallel lists.

    Attributes:
        copies: for each norm key, groups of ranks that hold copies of these parts (HSDP): they step
            them alike too.
        said: what the last numbers were made of.
    """

    def __init__(
        self, slots: Sequence[Slot], params: Sequence[Tensor], keys: Sequence[NormKey]
    ) -> None:
        self._groups: dict[NormKey, dict[int, None]] = {}
        self.copies: dict[NormKey, dict[ProcessGroup, None]] = {}
        self._ranks: dict[int, None] = {}
        self.said: list[str] = []
        for slot, param, key in zip(slots, params, keys, strict=True):
            if isinstance(param, DTensor) and key.shard_groups:
                if key not in self._groups:
                    self._ranks |= dict.fromkeys(
                        param.device_mesh.mesh.reshape(-1).tolist()
                    )
                self.copies.setdefault(key, {}).update(
                    dict.fromkeys(ranks_of_copies(param))
                )
                self._groups.setdefault(key, {})[slot.group] = None

    def numbers(
        self,
        config: Any,
        groups: ParamGroups,
        keys: Sequence[NormKey],
        all_keys: Sequence[NormKey],
    ) -> dict[NormKey, int]:
        """A number for each norm key of split parameters, made of the settings of this step.

        Args:
            keys: of this step's gradients.
        """
        if not self._groups:
            return {}
        self.said = [f"{name}={getattr(config, name, None)!r}" for name in _OF_CONFIG]
        common, numbers = list(self.said), {}
        for key, indices in self._groups.items():
            count = len(keys) if len(all_keys) == 1 else keys.count(key)
            said = [line for index in indices for line in _settings(groups, index)]
            said.append(f"gradients of {count} parameters split alike")
            numbers[key] = zlib.crc32("\n".join([*common, *said]).encode())
            self.said += said
        return numbers

    @property
    def ranks(self) -> list[int]:
        """Global numbers of the ranks that hold the other parts and copies, and of this one."""
        return sorted(self._ranks)


def disagreement(parts: Sequence[SettingsAlike]) -> ValueError:
    """How the ranks that hold the same parameters differ in what they would step them with; for
    all that noticed to ask, each when it does."""
    said = [line for settings in parts for line in settings.said]
    ranks = sorted({rank for settings in parts for rank in settings.ranks})
    how = difference_told(said, ranks)
    return ValueError(
        f"the ranks that share split parameters disagree: {how}; nothing was stepped"
    )


def _settings(groups: ParamGroups, index: int) -> list[str]:
    first = slot_name(groups, Slot(index, 0))
    return [
        f"{name}={_plain(value)!r} of the group of {first}"
        for name, value in sorted(groups[index].items())
        if name not in _NOT_COMPARED
    ]


def _plain(value: Any) -> Any:
    """A value to compare; what lies on a device is not waited for."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else "on a device"
    return (
        value
        if isinstance(value, (bool, int, float, str, tuple, list, torch.dtype, Mapping))
        else type(value)
    )
