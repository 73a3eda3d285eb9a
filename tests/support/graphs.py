"""A CUDA graph for machines without one: a tape of launches and torch operations, replayed into the
same tensors.

As with the real thing, capturing does nothing to tensors that were there before, a replay finds
everything at the addresses of the capture, and whoever reads a tensor while it is captured fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mp_optim.precision import graph_step, verdict
from mp_optim.update import sums
from mp_optim.update.backends.triton import backend, launches

_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")


class _Tape(TorchDispatchMode):
    def __init__(self, played: list[Callable[[], object]]) -> None:
        super().__init__()
        self.played = played

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in _READS, f"{func} while a graph is captured"
        if func._schema.is_mutable:
            self.played.append(lambda: func(*args, **kwargs))
            return args[0]
        found = func(*args, **kwargs)
        memory = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        views = [leaf for leaf in tree_leaves(found) if leaf.untyped_storage().data_ptr() in memory]
        if not views and not name.startswith(("empty", "new_empty")):
            self.played.append(lambda: self.write(found, func(*args, **kwargs)))
        return found

    @staticmethod
    def write(places: Any, values: Any) -> None:
        for place, value in zip(tree_leaves(places), tree_leaves(values), strict=True):
            place.copy_(value)


class TapeGraph:
    """See :class:`mp_optim.precision.graph_step.CudaGraph`."""

    made: ClassVar[list[TapeGraph]] = []

    def __init__(self) -> None:
        self.played: list[Callable[[], object]] = []
        TapeGraph.made.append(self)

    def capture(self, work: Callable[[], Any]) -> Any:
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def rooted(values: Tensor) -> Tensor:
            place = torch.empty_like(values)
            self.played.append(lambda: place.copy_(sums.root(values)))
            return place

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                GridExecutor,
                "__call__",
                lambda executor, *args, **named: self.played.append(
                    lambda: launch(executor, *args, **named)
                ),
            )
            patch.setattr(verdict, "root", rooted)
            patch.setattr(backend, "root", rooted)
            patch.setattr(launches, "root", rooted)
            with _Tape(self.played):
                return work()

    def replay(self) -> None:
        assert self.played, "nothing was captured"
        with torch.no_grad():
            for play in self.played:
                play()


def allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every device graphs of this kind."""
    TapeGraph.made.clear()
    monkeypatch.setattr(graph_step, "graph_for", lambda device: TapeGraph)
