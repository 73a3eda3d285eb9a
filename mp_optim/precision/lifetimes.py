"""Whether memory that was once looked at still exists: an address alone may be that of other memory
by now."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor


class Lifetimes:
    """Told by torch when the memory of a tensor is freed, so that asking costs nothing and nothing
    is kept alive.

    Attributes:
        gone: indices whose memory was freed since it was watched.
    """

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self._watched: dict[int, weakref.ref[Any]] = {}

    def watch(self, index: int, tensor: Tensor) -> None:
        """Watch a plain tensor's memory from now on, instead of what was watched under this
        index."""
        self.gone.discard(index)
        gone = self.gone
        self._watched[index] = weakref.ref(
            tensor.untyped_storage(), lambda _: gone.add(index)
        )

    def forget(self, index: int) -> None:
        """Watch nothing under this index."""
        self.gone.discard(index)
        self._watched.pop(index, None)
