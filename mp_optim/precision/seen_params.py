"""The model's parameters as they were last seen, to notice what was done to them from outside."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from mp_optim.slots import all_same, are_plain, local_tensor

_VERSION = operator.attrgetter("_version")


class SeenParams:
    """Some parameters, and for each how often its data was written and where it lies. Replacing,
    writing or moving one changes that.

    An address alone may be that of other memory by now: torch tells when the memory of a parameter
    is freed, so that asking costs nothing and nothing is kept alive.

    Attributes:
        params: the tensors.
        plain: whether all of them are plain tensors.
    """

    def __init__(self, params: Iterable[Tensor] = ()) -> None:
        self.params: list[Tensor] = []
        self.plain = True
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._gone: set[int] = set()  # indices whose memory was freed
        self._watched: dict[int, weakref.ref[Any]] = {}
        self.extend(list(params))

    def extend(self, params: Sequence[Tensor]) -> None:
        """Take more parameters as seen."""
        start, plain = len(self.params), are_plain(params)
        self.params += params
        self._versions += _versions(params, plain)
        self._addresses += _addresses(params, plain)
        self.plain = self.plain and plain
        self._watch(range(start, len(self.params)))

    def look(self, params: Sequence[Tensor]) -> None:
        """Take what is there now as seen."""
        self.plain = are_plain(params)
        before, self._addresses = self._addresses, _addresses(params, self.plain)
        moved = [
            index
            for index, param in enumerate(params)
            if self._addresses[index] != before[index]
            or param is not self.params[index]
        ]
        self.params, self._versions = list(params), _versions(params, self.plain)
        self._watch([*moved, *self._gone])

    def written(self) -> None:
        """The parameters were written by a step, and by nothing else."""
        self._versions = _versions(self.params, self.plain)

    def changed(self, params: Sequence[Tensor]) -> list[int]:
        """Indices of parameters that are other tensors than were last seen, or were written or
        moved since."""
        same = all_same(params, self.params)
        plain = self.plain if same else are_plain(params)
        marks = _versions(params, plain), _addresses(params, plain)
        if same and marks == (self._versions, self._addresses) and not self._gone:
            return []
        return [
            index
            for index, (param, *mark) in enumerate(zip(params, *marks, strict=True))
            if self._differs(index, param, *mark)
        ]

    def is_same(self, index: int, param: Tensor) -> bool:
        """Whether a parameter is the one that was last seen at an index, and was neither written
        nor moved since."""
        plain = are_plain([param])
        (version,), (address,) = _versions([param], plain), _addresses([param], plain)
        return not self._differs(index, param, version, address)

    def _differs(self, index: int, param: Tensor, version: int, address: int) -> bool:
        return (
            param is not self.params[index]
            or index in self._gone
            or version != self._versions[index]
            or address != self._addresses[index]
        )

    def _watch(self, indices: Iterable[int]) -> None:
        """Notice when the memory of these parameters is freed: others' may get its address."""
        for index in list(indices):
            self._gone.discard(index)
            self._watched.pop(index, None)
            local = local_tensor(self.params[index])
            if are_plain([local]):
                self._watched[index] = _when_freed(local, index, self._gone)


def _when_freed(tensor: Tensor, index: int, gone: set[int]) -> weakref.ref[Any]:
    return weakref.ref(tensor.untyped_storage(), lambda _: gone.add(index))


def _versions(params: Sequence[Tensor], plain: bool) -> list[int]:
    """How often each was written: a DTensor counts what is done to it, its local tensor what is
    done to that."""
    if plain:
        return list(map(_VERSION, params))
    return [param._version + local_tensor(param)._version for param in params]


def _addresses(params: Sequence[Tensor], plain: bool) -> list[int]:
    if plain:
        return list(map(Tensor.data_ptr, params))
    local = map(local_tensor, params)
    return [tensor.data_ptr() if are_plain([tensor]) else 0 for tensor in local]
