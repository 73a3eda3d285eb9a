"""FP32 copies of state that is stored in blocks, as ``optimizer.state`` exports them.

If a caller edits a copy, the edit is encoded before the state is stepped, saved or read. After a
step the copy has the new values. So a copy behaves as live FP32 state, except for the rounding.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mp_optim.core.tensors import held_tensor
from mp_optim.host.host_memory import same_values

_USERS = getattr(torch._C, "_storage_Use_Count", None)


@dataclass(frozen=True, eq=False)
class Coded:
    """One state tensor that is stored in blocks.

    Attributes:
        stored: the codes.
        scale: FP32 scales, one per block.
        decode: returns the FP32 values of codes and scales, in the shape of the main param.
        encode: writes FP32 values of that shape, rounded, to codes and scales.
        check: raises ValueError if values cannot be stored.
    """

    stored: Tensor
    scale: Tensor
    decode: Callable[[Tensor, Tensor], Tensor]
    encode: Callable[[Tensor, Tensor, Tensor], None]
    check: Callable[[Tensor], None]

    def values(self) -> Tensor:
        """Return the FP32 values in new memory."""
        return self.decode(self.stored, self.scale)

    def take(self, values: Tensor) -> None:
        """Round FP32 values and store them as codes and scales.

        Args:
            values: FP32, in the shape of the main param.

        Raises:
            ValueError: the values cannot be stored.
        """
        self.check(values)
        self.encode(values, self.stored, self.scale)

    def rounded(self, values: Tensor) -> Tensor:
        """Return FP32 values after a round trip through codes and scales.

        Args:
            values: FP32, in the shape of the main param.

        Raises:
            ValueError: the values cannot be stored.
        """
        self.check(values)
        form = self.stored, self.scale
        stored, scale = (torch.empty_like(each, device=values.device) for each in form)
        self.encode(values, stored, scale)
        return self.decode(stored, scale)

    def versions(self) -> tuple[int, int]:
        """Return torch's version counters of codes and scales."""
        return self.stored._version, self.scale._version


class _Copy:
    """An FP32 copy of one state tensor, which a caller may hold.

    NOTE: ``alone`` is the number of references without any caller. If there are more references, a
    caller holds the copy.

    Attributes:
        leaf: the FP32 values.
        shown: the same values in the callers' layout.
        scale: a copy of the scales.
        versions: versions of codes and scales when the copy last had their values.
    """

    def __init__(self, name: str, coded: Coded, lay_out: Callable[[Tensor], Any]) -> None:
        self.name, self.coded = name, coded
        # detach() returns no view here; the base of a view would count as a reference.
        self.leaf = coded.values().detach()
        self.shown, self.scale = lay_out(self.leaf), coded.scale.clone()
        self.versions = coded.versions()
        self.alone = self.references()

    def references(self) -> tuple[int, ...]:
        """Return the reference counts of the exported objects and of their memory."""
        users = [0, 0]
        if _USERS is not None and not self.leaf.is_meta:
            users = [_USERS(each.untyped_storage()._cdata) for each in (self.leaf, self.scale)]
        return sys.getrefcount(self.shown), sys.getrefcount(self.scale), *users

    def is_held(self) -> bool:
        """True if a caller can still write to the copy."""
        return any(map(operator.gt, self.references(), self.alone))

    def take_edits(self) -> None:
        """Encode the values of the copy if a caller edited them. If a caller edited only the
        scales, store the scales.

        Raises:
            ValueError: the values cannot be stored; the message has parameter and key.
        """
        local = held_tensor(self.shown) if self.shown is not self.leaf else self.leaf
        local = local if type(local) is Tensor else self.leaf
        if self.versions != self.coded.versions():
            self.refresh()
            return
        values = self.coded.values()
        if (local.shape, local.dtype) != (values.shape, values.dtype):
            raise ValueError(
                f"optimizer.state: {self.name} was given memory of shape {tuple(local.shape)} and "
                f"{local.dtype}; assign memory of shape {tuple(values.shape)} and {values.dtype}"
            )
        given = local.to(values.device)
        scale, shown = self.coded.scale, self.scale.to(self.coded.scale.device)
        if not same_values(given, values):
            self.coded.take(given)
            self.refresh()
        elif shown.shape == scale.shape and not same_values(shown, scale):
            scale.copy_(shown)
            self.refresh()

    def refresh(self) -> None:
        """Overwrite the copy with the stored values."""
        values = self.coded.values()
        for local in (self.leaf, held_tensor(self.shown)):
            if type(local) is not Tensor:
                continue
            if (local.shape, local.dtype, local.device) == (
                values.shape,
                values.dtype,
                values.device,
            ):
                local.copy_(values)
            elif local is self.leaf:
                local.data = values
        self.scale.data = self.coded.scale.clone()
        self.versions = self.coded.versions()


class ShownCopies:
    """FP32 copies that callers hold, and the copies that the last call of :meth:`show` returned.

    Attributes:
        shown: copies that callers may have edited, by ids of owner and stored tensor.
    """

    def __init__(self) -> None:
        self.shown: dict[tuple[int, int], _Copy] = {}
        self._latest: list[tuple[int, int]] = []

    def show(
        self,
        owner: object,
        name: str,
        coded: Mapping[str, Coded],
        lay_out: Callable[[str, Tensor], Any],
        scale_of: Callable[[str], str],
    ) -> dict[str, Any]:
        """Return FP32 copies of the state of a slot that is stored in blocks, and copies of its
        scales, by key.

        If a caller still holds the copy of a key, return that copy again.

        Args:
            owner: the optimizer that exports the state.
            name: FQN of the slot, for messages.
            coded: the state that is stored in blocks, by key.
            lay_out: converts the values of a key to the callers' layout.
            scale_of: returns the key of a moment's scales.
        """
        self._take(self._latest)
        shown: dict[str, Any] = {}
        self._latest = []
        for key, each in coded.items():
            where = id(owner), id(each.stored)
            copy = self.shown.get(where)
            if copy is not None:
                copy.take_edits()
                if copy.leaf.device != each.stored.device:
                    copy.refresh()
            else:
                copy = _Copy(f"{name}.{key}", each, partial(lay_out, key))
                self.shown[where] = copy
            shown |= {key: copy.shown, scale_of(key): copy.scale}
            self._latest.append(where)
        return shown

    def take_edits(self) -> None:
        """Encode edits of callers, and drop copies that no caller holds.

        Raises:
            ValueError: values cannot be stored; the message has parameter and key. The copy with
                these values is dropped.
        """
        self._take(list(self.shown))

    def refresh(self) -> None:
        """Overwrite all copies with the stored values."""
        for copy in self.shown.values():
            copy.refresh()

    def clear(self) -> None:
        """Drop all copies. Later edits of them are not stored."""
        self.shown, self._latest = {}, []

    def _take(self, some: Iterable[tuple[int, int]]) -> None:
        for where in some:
            if (copy := self.shown.get(where)) is None:
                continue
            try:
                copy.take_edits()
            except ValueError:
                del self.shown[where]
                raise
            if not copy.is_held():
                del self.shown[where]
