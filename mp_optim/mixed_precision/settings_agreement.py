"""Ranks that hold parts or copies of the same parameters compare what they step them with.

What is compared is all of the config and of the groups' settings, so that nothing can be forgotten:
here it is put into lines, whose number travels; the lines are read where the numbers differ.
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
"""Paths, of which only the use is compared."""


def of_config(config: OptimizerConfig) -> list[str]:
    """Return each field of the config that must be equal on all ranks."""
    said = {spec.name: getattr(config, spec.name) for spec in fields(config)}
    for name in _OF_ONE_RANK:
        del said[name]
    for name in _OF_ONE_MACHINE:
        said[name] = said[name] if said[name] is None else "a path"
    return [f"{name}={_plain(value)!r}" for name, value in said.items()]


def of_groups(groups: ParamGroups, indices: Iterable[int] | None = None) -> list[str]:
    """Return the settings of some groups, or of all, one a line. A group is named by its first
    parameter, because ranks may number theirs differently."""
    return [
        f"{name}={_plain(value)!r} of the group of {slot_name(groups, Slot(index, 0))}"
        for index in (range(len(groups)) if indices is None else indices)
        for name, value in sorted(group_settings(groups[index]).items())
    ]


def _plain(value: Any) -> Any:
    """Return a value to compare. Values on a device are not waited for."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else "on a device"
    kinds = (bool, int, float, str, tuple, list, torch.dtype, Mapping, type(None))
    return value if isinstance(value, kinds) else type(value)


_UNSTEPPED, _UNCHANGED = "; nothing was stepped", "; nothing was changed"


class SettingsAlike:
    """The settings with which this rank steps parameters that it shares with other ranks.

    Args:
        slots: slots of the parameters that are stepped.
        params: their tensors: DTensors, or the parts of a distributed optimizer.
        keys: their norm keys.

    Attributes:
        device: the first parameter's device.
        keys: every norm key once, in order.
        copies: for each norm key of DTensors, groups of ranks that hold copies of these parts
            (HSDP), which step them alike.
        said: lines of which the last numbers were made.
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
        self._ranks: dict[int, None] = {}
        for slot, param, key in zip(slots, params, keys, strict=True):
            if is_dtensor(param) and key.shard_groups:
                copies = dict.fromkeys(ranks_of_copies(param))
                self.copies.setdefault(key, {}).update(copies)
                if key not in self._groups:
                    self._ranks |= dict.fromkeys(param.device_mesh.mesh.reshape(-1).tolist())
            elif shard_info(param).shard_groups:
                self._add_ranks(shard_info(param).shard_groups)
            else:
                continue
            self._groups.setdefault(key, {})[slot.group] = None

    def _add_ranks(self, groups: Iterable[ProcessGroup]) -> None:
        for group in groups:
            self._ranks |= dict.fromkeys(dist.get_process_group_ranks(group))

    def check(self, config: OptimizerConfig, groups: ParamGroups) -> None:
        """Compare all settings, before what they say is done. Collective.

        Raises:
            ValueError: ranks have others, naming them.
        """
        for key, copies in self.copies.items():  # a distributed optimizer compares at construction
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
        """Return a number for each norm key of shared parameters, made of the settings of this
        step, for :func:`~mp_optim.mixed_precision.grad_norm.agree` to compare in the reduction of
        the norm.

        Args:
            keys: norm keys of this step's gradients.
            all_keys: norm keys of the model.
            over: ranks that share all parameters, if each of them steps everything.
            also: more lines that the ranks have to have in common.
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

    @property
    def ranks(self) -> list[int]:
        """Global numbers of the ranks that hold the other parts and copies, and of this one."""
        return sorted(self._ranks)


def disagreement(parts: Sequence[SettingsAlike]) -> ValueError:
    """Return an error with the difference between ranks that hold the same parameters. Each rank
    that noticed it calls this by itself."""
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
        sharers: the name of each trained parameter here, and the groups that share it.
        doing: name of the call.
        values: arguments by parameter name. Other names are compared on all ranks.
        device: device of the numbers that are reduced.

    Raises:
        ValueError: ranks have other values, naming them.
        MissingRanksError: a rank calls something else, or is gone.
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
            text = f"comparing what {doing} is given"
            check_agreement(groups, lines, device, text, f"parameters ({doing})", _UNCHANGED)


def _described(value: Any) -> str:
    """Return a line with a value's kind, shape and checksum; without a checksum for a part."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    text = f"{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}, {value.layout}"
    is_part = is_dtensor(value) or isinstance(value, FlatShard) or value.is_meta
    if is_part or value.layout != torch.strided or not value.is_floating_point():
        return text
    (checksum,) = checksums_of([value.detach().float().contiguous().view(-1)])
    return f"{text}, checksum {checksum:08x}"
