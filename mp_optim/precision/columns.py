"""What the precision wrappers remember of every slot, as columns: one pass over a list is cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from mp_optim.precision.measure import NormKey
from mp_optim.slots import Slot, SlotUpdates, SteadyList, all_same, are_plain, current_grads, local_tensor

__all__ = ["SlotColumns"]


@dataclass
class SlotColumns:
    """What was last seen at every slot, in slot order, as parallel lists: one pass over each is cheap.

    Attributes:
        slots: which slot.
        params: the model tensor there.
        versions, addresses: how often its data was written, and where it lies; what an outside change is judged by.
        separate: whether it is stepped on another tensor, its main param.
        bound: whether it was trainable when its group was added or since, and so has state.
        keys: which norm its gradient counts in.
        streams: what tells its random numbers from others'.
        first: index of each group's first slot.
    """

    slots: list[Slot] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    separate: list[bool] = field(default_factory=list)
    bound: list[bool] = field(default_factory=list)
    keys: list[NormKey] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)

    def index(self, slot: Slot) -> int:
        """Where a slot is in the lists."""
        return self.first[slot.group] + slot.position

    @property
    def distinct_keys(self) -> list[NormKey]:
        """Every key once, in order. Equal keys are one object, so that telling them apart is cheap."""
        return list({id(key): key for key in self.keys}.values())

    def shared_key(self, key: NormKey) -> NormKey:
        """The object that stands for all keys equal to this one."""
        return next((known for known in self.distinct_keys if known == key), key)

    def changed(self, params: Sequence[Tensor]) -> list[int]:
        """Indices of slots whose tensor is another one than was last seen, or was written or moved since."""
        versions, addresses = _versions(params), _addresses(params)
        if versions == self.versions and addresses == self.addresses and all_same(params, self.params):
            return []
        return [index for index, param in enumerate(params) if param is not self.params[index]
                or versions[index] != self.versions[index] or addresses[index] != self.addresses[index]]

    def see(self, param: Tensor) -> None:
        """Take the tensor of one more slot as seen."""
        self.params.append(param)
        self.versions += _versions([param])
        self.addresses += _addresses([param])

    def look(self, params: Sequence[Tensor]) -> None:
        """Take what is there now as seen."""
        self.params, self.versions, self.addresses = list(params), _versions(params), _addresses(params)

    def grads(self, params: Sequence[Tensor], name_of: Callable[[Slot], str]) -> tuple[list[int], SteadyList]:
        """Which slots have a gradient now, as indices, and their local gradients.

        Raises:
            TypeError: a gradient is sparse or not floating point, naming the parameter.
        """
        found = current_grads(params)
        indices = [index for index, grad in enumerate(found) if grad is not None]
        grads = SteadyList(grad for grad in found if grad is not None)
        if {grad.layout for grad in grads} - {torch.strided} or not all(d.is_floating_point for d in grads.dtypes):
            index, grad = next((i, g) for i, g in zip(indices, grads, strict=True)
                               if g.layout != torch.strided or not g.is_floating_point())
            raise TypeError(f"{name_of(self.slots[index])}: gradient is {grad.dtype}, layout {grad.layout}; dense "
                            "floating-point gradients are supported (build the embedding with sparse=False)")
        return indices, grads if are_plain(grads) else SteadyList(map(local_tensor, grads))

    def updates(self, indices: Sequence[int], grads: Sequence[Tensor], multipliers: Mapping[str, float]) -> SlotUpdates:
        """The step of the slots that have a gradient.

        Args:
            indices, grads: from :meth:`grads`.
            multipliers: by norm group.
        """
        params = [self.params[index] for index in indices]
        writable = params if are_plain(params) else [local_tensor(param) for param in params]
        keys = [self.keys[index] for index in indices]
        return SlotUpdates(
            slots=[self.slots[index] for index in indices], grads=grads,
            multipliers=[multipliers[key.group] for key in keys],
            outputs=[param if self.separate[index] else None for index, param in zip(indices, writable, strict=True)],
            shard_groups=[key.shard_groups for key in keys], streams=[self.streams[index] for index in indices])


def _versions(params: Sequence[Tensor]) -> list[int]:
    """How often each was written: a DTensor counts what is done to it, its local tensor what is done to that."""
    return [p._version if type(p) in (Tensor, Parameter) else p._version + local_tensor(p)._version for p in params]


def _addresses(params: Sequence[Tensor]) -> list[int]:
    return [p.data_ptr() if type(p) in (Tensor, Parameter) else local_tensor(p).data_ptr() for p in params]
