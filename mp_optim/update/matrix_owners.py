"""Who orthogonalises which matrix, and in which order: whole numbers in, whole numbers out, so that
every rank comes to the same plan by itself."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed import ProcessGroup

from mp_optim.slots.matrix_parts import MatrixParts

BATCH_BYTES = 64 << 20
"""Of whole matrices that a rank receives in one batch, unless one matrix is larger."""
LEAST_BATCH_BYTES = 1 << 20
"""What there is for a rank is cut into so large batches, at least, and otherwise into four: all but
the first travel while another is computed."""
_BATCHES = 4


def newton_schulz_flops(
    rows: int, columns: int, steps: int, method: str = "standard"
) -> int:
    """Floating-point operations of the products for one matrix, a multiplication and an addition
    each counted.

    Args:
        method: see :func:`~mp_optim.update.newton_schulz.orthogonalize_each`.
    """
    short, long = sorted((rows, columns))
    if method == "gram" and long >= 2 * short:
        made_anew = 1 + steps // 2
        small = 2 * made_anew + 8 * (steps - made_anew)
        return made_anew * 4 * short * short * long + small * short**3
    return steps * (4 * short * short * long + 2 * short**3)


def assign(
    costs: Sequence[int], held: Sequence[Sequence[int]], loads: Sequence[int]
) -> list[int]:
    """The owner of each matrix: the dearest matrix left goes to the rank with least to do (Graham's
    LPT rule), among equals to the one that has most of it.

    Args:
        costs: of each matrix.
        held: of each matrix, how many elements each rank has.
        loads: what each rank has to do already.

    Returns:
        Ranks. The load of none exceeds that of another by more than the largest cost, unless it did
        before.
    """
    loads, owners = list(loads), [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        sizes = held[item]
        owner = min(
            range(len(loads)), key=lambda rank: (loads[rank], -sizes[rank], rank)
        )
        owners[item] = owner
        loads[owner] += costs[item]
    return owners


def batches(
    owners: Sequence[int], sizes: Sequence[int], ranks: int, limit: int
) -> list[list[int]]:
    """Matrices that travel together, so that every rank has something to compute in each batch.

    Args:
        sizes: of each matrix.
        limit: what a rank owns in a batch is no larger, or is one matrix.
    """
    found: list[list[int]] = []
    batch, filled = [0] * ranks, [0] * ranks
    for item, (owner, size) in enumerate(zip(owners, sizes, strict=True)):
        if filled[owner] and filled[owner] + size > limit:
            batch[owner], filled[owner] = batch[owner] + 1, 0
        filled[owner] += size
        while len(found) <= batch[owner]:
            found.append([])
        found[batch[owner]].append(item)
    return found


@dataclass(frozen=True)
class Plan:
    """Who orthogonalises which matrix of several parameters.

    Attributes:
        items: the matrices, each as (parameter, matrix of its stack).
        owners: of each, a rank of the grid. costs: of each, floating-point operations.
        batches: which travel together, in the order of batches.
    """

    items: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    costs: tuple[int, ...]
    batches: tuple[tuple[int, ...], ...]

    def loads(self, ranks: int) -> list[int]:
        """Floating-point operations of each rank."""
        found = [0] * ranks
        for owner, cost in zip(self.owners, self.costs, strict=True):
            found[owner] += cost
        return found


@lru_cache(maxsize=64)
def plan(
    params: tuple[MatrixParts, ...],
    flops: tuple[int, ...],
    loads: tuple[int, ...],
    width: int,
) -> Plan:
    """The owners of all matrices of parameters whose ranks are the same.

    Args:
        flops: floating-point operations of the products for each matrix of a parameter.
        loads: what each rank has to do already, of the same kind.
        width: bytes of an element that travels.
    """
    items = [
        (index, matrix)
        for index, param in enumerate(params)
        for matrix in range(len(param.parts))
    ]
    costs = [flops[index] for index, _ in items]
    held = [params[index].sizes[matrix] for index, matrix in items]
    owners = assign(costs, held, loads)
    sizes = [params[index].rows * params[index].columns * width for index, _ in items]
    ranks = params[0].grid.size
    share = sum(sizes) // (ranks * _BATCHES)
    limit = min(max(share, LEAST_BATCH_BYTES), BATCH_BYTES)
    together = batches(owners, sizes, ranks, limit)
    return Plan(tuple(items), tuple(owners), tuple(costs), tuple(map(tuple, together)))


class MatrixOwners:
    """What the ranks have to do in a step, over all of an optimizer's launches, so that a later one
    goes on where an earlier one stopped.

    NOTE: only launches with split matrices are told of here: all ranks that share those have them
    in one order, and so the same numbers.

    Attributes:
        owned, known: matrices that this rank orthogonalised in the last step, and all that it had a
            part of.
        flops: of the owned ones.
        bytes_sent: to other ranks.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._loads: dict[tuple[str, ...], list[int]] = {}
        self._reset()

    def _reset(self) -> None:
        self._seen.clear()
        self._loads.clear()
        self.owned = self.known = self.flops = self.bytes_sent = 0

    def begin(self, keys: Iterable[Hashable]) -> None:
        """A launch begins; a step does when one of its parameters comes again.

        Args:
            keys: of the parameters whose matrices are split.
        """
        keys = list(keys)
        if not self._seen.isdisjoint(keys):
            self._reset()
        self._seen.update(keys)

    def plan(
        self,
        params: Sequence[MatrixParts],
        groups: Sequence[ProcessGroup],
        flops: Sequence[int],
        width: int,
    ) -> Plan:
        """Share out the matrices of parameters whose ranks are the same (see :func:`plan`).

        Args:
            groups: that span the grid of these ranks.
            flops, width: see :func:`plan`.
        """
        grid = params[0].grid
        name = tuple(group.group_name for group in groups)
        loads = self._loads.setdefault(name, [0] * grid.size)
        planned = plan(tuple(params), tuple(flops), tuple(loads), width)
        (here,) = grid.block(*(group.rank() for group in groups))
        self._count(planned, here)
        added = planned.loads(grid.size)
        self._loads[name] = list(map(operator.add, loads, added))
        return planned

    def metrics(self) -> dict[str, float]:
        """What this rank did for matrices that ranks share, in the last step."""
        return {"muon_flops": self.flops, "bytes_exchanged": self.bytes_sent}

    def __str__(self) -> str:
        """As the end of a sentence; empty if no matrices are shared."""
        if not self.known:
            return ""
        return f"; of {self.known} matrices split over ranks this one orthogonalises {self.owned}"

    def _count(self, planned: Plan, rank: int) -> None:
        costs = zip(planned.owners, planned.costs, strict=True)
        owned = [cost for owner, cost in costs if owner == rank]
        self.owned += len(owned)
        self.known += len(planned.items)
        self.flops += sum(owned)
