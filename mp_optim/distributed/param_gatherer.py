"""Parameters on their way back: every rank's shard to every other rank, after the step or during
the next forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mp_optim.distributed.buckets import Bucket, Entry
from mp_optim.distributed.collectives import all_gather
from mp_optim.process.leases import before_writing
from mp_optim.ranks.missing_ranks import wait_for_all


class ParamGatherer:
    """Gathers the buckets' parameters.

    Args:
        modules: with these, gathering overlaps with the next forward: each module waits for its own
            parameters, and for those of children that are never called (``nn.ParameterDict``,
            ``nn.ParameterList``).
        guard: context in which communication happens; gives failures a name.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: ProcessGroup,
        modules: Sequence[nn.Module],
        guard: Callable[[str], Any],
    ) -> None:
        self._buckets, self._group, self._guard = buckets, group, guard
        self._under_way: dict[int, Any] = {}
        self._waited_for: set[int] | None = None
        self._bucket_of: dict[int, int] = {}
        self._overlaps = bool(modules)
        self.bytes_gathered = 0
        self.look()
        for module in {id(m): m for root in modules for m in root.modules()}.values():
            module.register_forward_pre_hook(self._before_forward)
        for root in modules:
            root.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]

    def look(self) -> None:
        """Take note of the tensors that are parameters now."""
        self._bucket_of = {
            id(entry.param): index
            for index, bucket in enumerate(self._buckets)
            for entry in bucket.entries
        }

    def start(self) -> None:
        """Gather everything; with overlap, :meth:`finish` or the next forward waits for it.
        Collective."""
        self.finish()
        self.bytes_gathered = 0
        for index in reversed(range(len(self._buckets))):  # in the order of forward
            bucket = self._buckets[index]
            self.bytes_gathered += bucket.params.nbytes
            before_writing([bucket.params])
            with self._guard("gathering parameters"):
                self._under_way[index] = all_gather(
                    bucket.params, bucket.plan.bounds, self._group
                )
        if self._overlaps:
            self._waited_for = set()
        else:
            self.finish()

    def finish(self) -> None:
        """All parameters are complete on return."""
        for index in list(self._under_way):
            self._wait(index)
        self._waited_for = None

    def _wait(self, index: int) -> None:
        works = self._under_way.pop(index, [])
        with self._guard("gathering parameters"):
            wait_for_all(works, self._group, self._buckets[index].params.device)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if self._waited_for is None:
            return
        for param in _own(module):
            index = self._bucket_of.get(id(param))
            if index is not None:
                self._waited_for.add(id(param))
                self._wait(index)

    def _before_state_dict(self, *_: Any) -> None:
        self.finish()

    def check_use(self, entry: Entry) -> None:
        """A parameter got a gradient, so forward has used it: make sure that forward waited for it.

        Raises:
            RuntimeError: it did not, and may have used old values.
        """
        if self._waited_for is not None and id(entry.param) not in self._waited_for:
            raise RuntimeError(
                f"{entry.name} was used without calling the module that holds it, so nothing "
                "waited for its new values: set overlap_param_gather=False, or call "
                "optimizer.finish_param_sync() before forward"
            )


def _own(module: nn.Module) -> Iterator[Tensor]:
    """Parameters of a module and of its children that have no forward of their own."""
    yield from (param for param in module._parameters.values() if param is not None)
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _own(child)
