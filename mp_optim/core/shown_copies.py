"""FP32 copies of state that is stored in blocks, as ``optimizer.state`` shows it.

A caller that holds such a copy holds the state: what it writes is encoded before the state is
stepped, saved or read, and after a step the copy has the new values. So a copy behaves as live FP32
state does, but for the rounding.
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
        stored: the codes. scale: FP32, one per block.
        decode: returns the FP32 values, in the shape of the main param.
        encode: writes FP32 values of that shape, rounded.
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
        """Store FP32 values, rounded."""
        self.check(values)
        self.encode(values, self.stored, self.scale)

    def rounded(self, values: Tensor) -> Tensor:
        """Return FP32 values as they would be stored."""
        self.check(values)
        form = self.stored, self.scale
        stored, scale = (torch.empty_like(each, device=values.device) for each in form)
        self.encode(values, stored, scale)
        return self.decode(stored, scale)

    def versions(self) -> tuple[int, int]:
        """Return how often codes and scales were written, as far as torch counts it."""
        return self.stored._version, self.scale._version


class _Copy:
    """A copy that was handed out.

    NOTE: ``alone`` counts the references that this object has; a caller has further ones.

    Attributes:
        leaf: the FP32 values. shown: the same in the caller's layout.
        scale: a copy of the scales, for callers that look for them.
        versions: of codes and scales when the copies agreed with them.
    """

    def __init__(self, name: str, coded: Coded, lay_out: Callable[[Tensor], Any]) -> None:
        self.name, self.coded = name, coded
        self.leaf = coded.values().detach()  # no view, whose base would be a user of its memory
        self.shown, self.scale = lay_out(self.leaf), coded.scale.clone()
        self.versions = coded.versions()
        self.alone = self.references()

    def references(self) -> tuple[int, ...]:
        """Return the numbers of references to the shown objects, and to their memory."""
        users = [0, 0]
        if _USERS is not None and not self.leaf.is_meta:
            users = [_USERS(each.untyped_storage()._cdata) for each in (self.leaf, self.scale)]
        return sys.getrefcount(self.shown), sys.getrefcount(self.scale), *users

    def is_held(self) -> bool:
        """Return whether a caller can still write to the copy."""
        return any(map(operator.gt, self.references(), self.alone))

    def take_edits(self) -> None:
        """Encode the values of the copy if they were edited; else take scales that were.

        Raises:
            ValueError: they cannot be stored, naming parameter and key.
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
                f"{local.dtype}, and is shown as {tuple(values.shape)} and {values.dtype}; give it "
                "memory of that form"
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
        """Give the copy the values that are stored now."""
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
    """The copies that callers hold, and those of the last look.

    Attributes:
        shown: copies that callers may have written, by owner and stored tensor.
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
        """Return copies of the coded state of a slot, and of its scales: those that were handed out
        before, if a caller still has them.

        Args:
            owner: shows the state in its layout.
            name: of the slot. scale_of: returns the key of a moment's scales.
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
        """Encode what callers wrote to copies, and forget those that no caller has.

        Raises:
            ValueError: values cannot be stored, naming parameter and key. Such a copy is forgotten.
        """
        self._take(list(self.shown))

    def refresh(self) -> None:
        """Give all copies the values that are stored now."""
        for copy in self.shown.values():
            copy.refresh()

    def clear(self) -> None:
        """Forget all copies."""
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
