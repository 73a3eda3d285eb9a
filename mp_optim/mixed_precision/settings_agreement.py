"""Ranks that have parts or copies of the same parameters compare the settings with which they step
these parameters.

All fields of the config and all settings of groups are compared, as lines of text. The ranks
exchange a hash of the lines, and the lines only if hashes differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import ParamGroups, Slot, group_settings, local_tensor, slot_name
from mp_optim.core.flat_shard import FlatShard
from mp_optim.core.param_attributes import shard_info
from mp_optim.core.tensor_layout import ranks_of_copies
from mp_optim.host.calls import in_own_modes
from mp_optim.host.torch_types import is_dtensor
from mp_optim.kernels.checksums import checksums_of
from mp_optim.mixed_precision.grad_norm import NormKey
from mp_optim.process_groups.agreement import check_agreement, difference_told, number_of

_OF_ONE_RANK = ("timers", "host_threads")
_OF_ONE_MACHINE = ("optimizer_state_path",)
"""Config fields that contain a path. Ranks compare only whether a path is set."""


def of_config(config: OptimizerConfig) -> list[str]:
    """Return a line for each field of the config that must be equal on all ranks."""
    said = {spec.name: getattr(config, spec.name) for spec in fields(config)}
    for name in _OF_ONE_RANK:
        del said[name]
    for name in _OF_ONE_MACHINE:
        said[name] = said[name] if said[name] is None else "a path"
    return [f"{name}={_plain(value)!r}" for name, value in said.items()]


def of_groups(groups: ParamGroups, indices: Iterable[int] | None = None) -> list[str]:
    """Return a line for each setting of some groups. A line names the group by its first parameter,
    because ranks may number their groups differently.

    Args:
        groups: the optimizer's param groups.
        indices: indices of the groups; None for all.
    """
    return [
        f"{name}={_plain(value)!r} of the group of {slot_name(groups, Slot(index, 0))}"
        for index in (range(len(groups)) if indices is None else indices)
        for name, value in sorted(group_settings(groups[index]).items())
    ]


def _plain(value: Any) -> Any:
    """Return a setting in the form that ranks compare. The value of a tensor on an accelerator is
    left out, because reading the value would wait for the device."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else "on a device"
    kinds = (bool, int, float, str, tuple, list, torch.dtype, Mapping, type(None))
    return value if isinstance(value, kinds) else type(value)


_UNSTEPPED, _UNCHANGED = "; nothing was stepped", "; nothing was changed"


class SettingsAlike:
    """The settings with which this rank steps parameters that it shares with other ranks.

    Args:
        slots: the slots that are stepped.
        params: the parameter of each slot: a DTensor, or this rank's part with a distributed
            optimizer.
        keys: norm key of each slot.

    Attributes:
        device: device of the first parameter.
        keys: each norm key once, in slot order.
        copies: for each norm key of DTensors, the groups of ranks that have copies of the same
            parts (HSDP).
        said: the lines that :meth:`numbers` hashed last.
        ranks: global numbers of the ranks that have the other parts and copies, with this rank.
    """

    def __init__(
        self, slots: Sequence[Slot], params: Sequence[Tensor], keys: Sequence[NormKey]
    ) -> None:
        devices = (local_tensor(param).device for param in params)
        self.device = next(devices, torch.device("cpu"))
        self.keys = list(dict.fromkeys(keys))
        self._groups: dict[NormKey, dict[int, None]] = {}
        self.copies: dict[NormKey, dict[ProcessGroup, None]] = {}
        self.said: list[str] = []
        self.ranks: dict[int, None] = {}
        for slot, param, key in zip(slots, params, keys, strict=True):
            if is_dtensor(param) and key.shard_groups:
                copies = dict.fromkeys(ranks_of_copies(param))
                self.copies.setdefault(key, {}).update(copies)
                if key not in self._groups:
                    self.ranks |= dict.fromkeys(param.device_mesh.mesh.reshape(-1).tolist())
            elif shard_info(param).shard_groups:
                self._add_ranks(shard_info(param).shard_groups)
            else:
                continue
            self._groups.setdefault(key, {})[slot.group] = None

    def _add_ranks(self, groups: Iterable[ProcessGroup]) -> None:
        for group in groups:
            self.ranks |= dict.fromkeys(dist.get_process_group_ranks(group))

    def check(self, config: OptimizerConfig, groups: ParamGroups) -> None:
        """Compare all settings with the other ranks, before any of them is used. Collective.

        Args:
            config: the config.
            groups: the optimizer's param groups.

        Raises:
            ValueError: settings differ; the message names the ranks and the setting.
        """
        # ``copies`` has no keys of a DistributedOptimizer, whose constructor compares the settings.
        for key, copies in self.copies.items():
            over, said = [*key.shard_groups, *copies], of_config(config)
            said += of_groups(groups, self._groups[key])
            doing, what = "comparing the ranks' settings", "parameters"
            check_agreement(over, said, self.device, doing, what, _UNSTEPPED)

    def numbers(
        self,
        config: OptimizerConfig,
        groups: ParamGroups,
        keys: Sequence[NormKey],
        all_keys: Sequence[NormKey],
        over: Sequence[ProcessGroup] = (),
        also: Sequence[str] = (),
    ) -> dict[NormKey, int]:
        """Return a hash of this step's settings for each norm key of shared parameters.
        :func:`~mp_optim.mixed_precision.grad_norm.agree` compares the hashes in the reduction of
        the norm.

        Args:
            config: the config.
            groups: the optimizer's param groups.
            keys: norm keys of this step's gradients.
            all_keys: every norm key of the model.
            over: groups of a distributed optimizer whose ranks each step all parameters; empty
                otherwise.
            also: further lines that must be equal on the ranks that share parameters.
        """
        shared: Mapping[NormKey, Iterable[int]] = self._groups
        if over:
            self._add_ranks(over)
            shared = {key: range(len(groups)) for key in all_keys}
        if not shared:
            return {}
        self.said = [*of_config(config), *also]
        common, numbers = list(self.said), {}
        for key, indices in shared.items():
            count = len(keys) if len(all_keys) == 1 else keys.count(key)
            said = of_groups(groups, indices)
            said.append(f"gradients of {count} parameters split alike")
            numbers[key] = number_of([*common, *said])
            self.said += said
        return numbers


def disagreement(parts: Sequence[SettingsAlike]) -> ValueError:
    """Return the error about settings that differ between ranks, with the difference.

    This is not a collective. Each rank calls it when the rank finds the difference.

    Args:
        parts: the settings of each wrapper.
    """
    said = [line for settings in parts for line in settings.said]
    ranks = sorted({rank for settings in parts for rank in settings.ranks})
    how = difference_told(said, ranks)
    return ValueError(f"the ranks that share parameters disagree: {how}{_UNSTEPPED}")


@in_own_modes
def check_write(
    sharers: Iterable[tuple[str, tuple[ProcessGroup, ...]]],
    doing: str,
    values: Any,
    device: torch.device,
) -> None:
    """Compare the arguments of a call between the ranks that share parameters. Collective, once for
    each kind of sharing.

    Args:
        sharers: FQN of each trained parameter on this rank, with the groups of ranks that share it.
        doing: name of the call.
        values: arguments by FQN. Arguments with other names are compared on all ranks.
        device: device of the reduced numbers.

    Raises:
        ValueError: the arguments differ; the message names the ranks.
        MissingRanksError: a rank called another function, or has ended.
    """
    given = dict(values) if isinstance(values, Mapping) else {"all": values}
    named: dict[tuple[ProcessGroup, ...], set[str]] = {}
    for name, groups in sharers:
        named.setdefault(tuple(g for g in groups if g.size() > 1), set()).add(name)
    unknown = set(given).difference(*named.values())
    for groups, names in named.items():
        if groups:
            common = sorted((names | unknown) & given.keys(), key=str)
            lines = [f"{name}: {_described(given[name])}" for name in common]
            text = f"comparing the arguments of {doing}"
            check_agreement(groups, lines, device, text, f"parameters ({doing})", _UNCHANGED)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    text = f"{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}, {value.layout}"
    is_part = is_dtensor(value) or isinstance(value, FlatShard) or value.is_meta
    if is_part or value.layout != torch.strided or not value.is_floating_point():
        return text
    (checksum,) = checksums_of([value.detach().float().contiguous().view(-1)])
    return f"{text}, checksum {checksum:08x}"
