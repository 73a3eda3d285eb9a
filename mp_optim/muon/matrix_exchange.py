"""Exchange of matrices that are sharded over ranks.

Owners orthogonalize them. Parts are sent to the owners and results back, all-to-all, a batch of
matrices at a time. On a grid of ranks that several process groups span, parts are sent along one
axis after the other, so the groups of the mesh are enough.

NOTE: batches overlap: while one is computed, the next one's parts are received and the previous
one's results are sent. All ranks start the same communication in the same order, because all have
the same plan (:func:`plan_exchange`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.core.partition import box_views
from mp_optim.core.tensor_layout import Boxes, MatrixParts, numel_of
from mp_optim.process_groups.missing_ranks import naming_missing_ranks, start_collective, wait_for

Compute = Callable[[list[Tensor]], Sequence[Tensor]]
_Pieces = dict[int, list[Tensor]]
"""Flattened parts of a block of ranks, in their order, by index of the matrix in the plan."""

_DOING = "exchanging parts of matrices with their owners"


@dataclass
class Exchange:
    """One exchange of the parts of several parameters between the same ranks.

    Attributes:
        plan: owner of each matrix.
        params: parts of each rank.
        groups: process groups that span the grid of these ranks.
        sent: this rank's parts of the parameters, contiguous.
        received: memory for this rank's parts of the results, contiguous.
        device: device of communication and products.
        compute: returns the results of whole matrices, in their shapes and in the dtype of
            ``received``.
        bytes_sent: number of bytes sent to other ranks so far.
    """

    plan: ExchangePlan
    params: Sequence[MatrixParts]
    groups: Sequence[ProcessGroup]
    sent: Sequence[Tensor]
    received: Sequence[Tensor]
    device: torch.device
    compute: Compute
    bytes_sent: int = 0

    def __post_init__(self) -> None:
        self._grid = self.params[0].grid
        self._here = tuple(
            group.rank() for group in self.groups
        )  # Coordinates of this rank in the grid.
        (self._rank,) = self._grid.block(*self._here)
        # Coordinates of each matrix's owner in the grid.
        self._owners = list(map(self._grid.coordinates, self.plan.owners))
        for param, part in zip(self.params, self.sent, strict=True):
            if (there := param.bounds(self._rank)[-1]) != part.numel():
                raise ValueError(
                    f"a part of {len(param.parts)} matrices of {param.rows} x {param.columns} has "
                    f"{part.numel()} elements instead of {there}"
                )

    def run(self) -> None:
        """Run the exchange. Collective over all ranks of the grid."""
        waiting = map(self._steps, self.plan.batches)
        under_way: list[Iterator[bool]] = []
        while begun := [*itertools.islice(waiting, 1), *under_way]:
            # Start with the newest batch: its parts are sent while an older one is computed.
            under_way = [batch for batch in begun if next(batch)]

    def _steps(self, batch: Sequence[int]) -> Iterator[bool]:
        """Run a batch stage by stage. Yield True while communication is in progress, False at the
        end."""
        axes = range(len(self.groups))
        pieces = {item: [self._of_item(self.sent, item)] for item in batch}
        for axis in reversed(axes):
            hop = self._to_owners(axis, batch, pieces)
            self.bytes_sent += hop.bytes_sent
            yield True
            pieces = hop.arrived(self.device)
        pieces = self._computed(pieces)
        for axis in axes:
            hop = self._from_owners(axis, batch, pieces)
            self.bytes_sent += hop.bytes_sent
            yield True
            is_last = axis == axes[-1]
            pieces = hop.arrived(self.received[0].device if is_last else self.device)
        targets = [self._of_item(self.received, item) for item in pieces]
        torch._foreach_copy_(targets, [flat for (flat,) in pieces.values()])
        yield False

    # -- products ---------------------------------------------------------------------------------

    def _computed(self, pieces: _Pieces) -> _Pieces:
        """Return the results of this rank's matrices, split like their parts."""
        if not pieces:
            return {}
        parts_of, wholes = {}, []
        for item, flats in pieces.items():
            index, matrix = self.plan.items[item]
            param = self.params[index]
            parts_of[item] = param.parts[matrix]
            wholes.append(assembled((param.rows, param.columns), parts_of[item], flats))
        results = self.compute(wholes)
        return {
            item: cut_matrix(whole, parts_of[item])
            for item, whole in zip(pieces, results, strict=True)
        }

    def _of_item(self, tensors: Sequence[Tensor], item: int) -> Tensor:
        """Return this rank's flattened part of a matrix of a parameter."""
        param, matrix = self.plan.items[item]
        start, stop = self.params[param].bounds(self._rank)[matrix : matrix + 2]
        return tensors[param].view(-1)[start:stop]

    # -- on the way -------------------------------------------------------------------------------

    def _to_owners(self, axis: int, batch: Sequence[int], pieces: _Pieces) -> _Hop:
        """Send each rank of a group the pieces of matrices that it owns.

        Owners at the same coordinate along this axis count, too: later axes pass the pieces on.
        """
        group, here = self.groups[axis], self._here
        sent: list[list[Tensor]] = [[] for _ in range(group.size())]
        for item in filter(pieces.__contains__, batch):
            sent[self._owners[item][axis]] += pieces[item]
        mine = [item for item in batch if self._owners[item][axis:] == here[axis:]]
        blocks = [self._grid.block(*here[:axis], place) for place in range(group.size())]
        coming = [self._sizes(mine, block) for block in blocks]
        return _Hop(group, self.device, self.sent[0].dtype, sent, coming)

    def _from_owners(self, axis: int, batch: Sequence[int], pieces: _Pieces) -> _Hop:
        """Send results back: each rank of a group gets the pieces of ranks with its coordinates.

        These are the coordinates along this axis and earlier ones.
        """
        group, here = self.groups[axis], self._here
        sent: list[list[Tensor]] = [[] for _ in range(group.size())]
        for item in filter(pieces.__contains__, batch):
            block = len(pieces[item]) // group.size()
            for place, of_rank in enumerate(sent):
                of_rank += pieces[item][place * block : (place + 1) * block]
        ranks = self._grid.block(*here[: axis + 1])
        coming: list[list[tuple[int, int]]] = []
        for place in range(group.size()):
            owner = (place, *here[axis + 1 :])
            theirs = [item for item in batch if self._owners[item][axis:] == owner]
            coming.append(self._sizes(theirs, ranks))
        return _Hop(group, self.device, self.received[0].dtype, sent, coming)

    def _sizes(self, items: Sequence[int], ranks: range) -> list[tuple[int, int]]:
        """Return the matrix and the number of elements of each part of ranks."""
        found = []
        for item in items:
            param, matrix = self.plan.items[item]
            sizes = self.params[param].sizes[matrix]
            found += [(item, sizes[rank]) for rank in ranks]
        return found


class _Hop:
    """Communication of pieces along one axis, started by the constructor.

    Args:
        sent: pieces for each rank of the group.
        coming: matrices and sizes of the pieces from each rank of the group.

    Attributes:
        bytes_sent: bytes sent to other ranks.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        sent: Sequence[Sequence[Tensor]],
        coming: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        self._group, self._coming, width = group, coming, dtype.itemsize
        self._guard = naming_missing_ranks(group)
        pieces = [piece for of_rank in sent for piece in of_rank]
        nothing = torch.empty(0, dtype=dtype, device=device)
        packed = torch.cat(pieces) if pieces else nothing
        self._packed = packed.to(
            device
        )  # Keep the buffer, because it is read until the communication ends.
        counts = [sum(size for _, size in of_rank) for of_rank in coming]
        sizes = [sum(map(Tensor.numel, of_rank)) * width for of_rank in sent]
        self.bytes_sent = sum(sizes) - sizes[group.rank()]
        if group.size() == 1:
            self._buffer, self._work = self._packed, None
            return
        self._buffer = torch.empty(sum(counts), dtype=dtype, device=device)
        with self._guard(_DOING):
            self._work = start_collective(
                dist.all_to_all_single,
                self._buffer.view(torch.uint8),
                self._packed.view(torch.uint8),
                [count * width for count in counts],
                sizes,
                group=group,
            )

    def arrived(self, device: torch.device) -> _Pieces:
        """Return the received pieces of each matrix, in the order of ranks, on a device."""
        if self._work is not None:
            with self._guard(_DOING):
                wait_for(self._work, self._group, self._buffer.device)
        self._packed = self._packed[:0]
        entries = [entry for of_rank in self._coming for entry in of_rank]
        flats = torch.split(self._buffer.to(device), [size for _, size in entries])
        pieces: _Pieces = {}
        for (item, _), flat in zip(entries, flats, strict=True):
            pieces.setdefault(item, []).append(flat)
        return pieces


def assembled(shape: tuple[int, int], parts: Sequence[Boxes], flats: Sequence[Tensor]) -> Tensor:
    """Return a whole matrix from its flattened parts."""
    if _are_in_order(parts, shape[1]):
        return torch.cat(list(flats)).view(shape)
    whole = flats[0].new_empty(shape)
    for part, flat in zip(parts, flats, strict=True):
        for box, values in box_views(flat, part):
            box.of(whole).copy_(values)
    return whole


def cut_matrix(whole: Tensor, parts: Sequence[Boxes]) -> list[Tensor]:
    """Return the flattened parts of a whole matrix: the inverse of :func:`assembled`."""
    if _are_in_order(parts, whole.shape[1]):
        return list(torch.split(whole.reshape(-1), list(map(numel_of, parts))))
    flats = []
    for part in parts:
        boxes = [box.of(whole).reshape(-1) for box in part]
        flats.append(torch.cat(boxes) if boxes else whole.new_empty(0))
    return flats


def _are_in_order(parts: Sequence[Boxes], columns: int) -> bool:
    """True if the parts are consecutive rows of a matrix."""
    end = 0
    for box in itertools.chain.from_iterable(parts):
        (row, column), (high, wide) = box.offsets, box.sizes
        if box.numel and (row * columns + column != end):
            return False
        if high > 1 and wide != columns:
            return False
        end += box.numel
    return True


# -- who owns which matrix: whole numbers in and out, so that every rank comes to the same plan ----

BATCH_BYTES = 64 << 20
"""Largest size in bytes of the whole matrices that a rank receives in one batch, unless one matrix
is larger."""
LEAST_BATCH_BYTES = 1 << 20
"""Smallest size of a batch in bytes. Larger matrices of a rank are divided into four batches, so
that all except the first are sent during products."""
_BATCHES = 4


def newton_schulz_flops(rows: int, columns: int, steps: int, method: str = "standard") -> int:
    """Return the floating-point operations of the products for one matrix.

    A multiplication and an addition each count as one.

    Args:
        method: see :func:`~mp_optim.muon.newton_schulz.orthogonalize_each`.
    """
    short, long = sorted((rows, columns))
    if method == "gram" and long >= 2 * short:
        made_anew = 1 + steps // 2
        small = 2 * made_anew + 8 * (steps - made_anew)
        return made_anew * 4 * short * short * long + small * short**3
    return steps * (4 * short * short * long + 2 * short**3)


def assign(costs: Sequence[int], held: Sequence[Sequence[int]], loads: Sequence[int]) -> list[int]:
    """Return the owner of each matrix.

    The most expensive remaining matrix is assigned to the rank with the smallest load (Graham's LPT
    rule). Among ranks of equal load the one with most of its elements is chosen.

    Args:
        costs: cost of each matrix.
        held: for each matrix, the number of elements on each rank.
        loads: current load of each rank.

    Returns:
        Ranks. No load exceeds another by more than the largest cost, unless it did before.
    """
    loads, owners = list(loads), [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        sizes = held[item]
        owner = min(range(len(loads)), key=lambda rank: (loads[rank], -sizes[rank], rank))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners


def exchange_batches(
    owners: Sequence[int], sizes: Sequence[int], ranks: int, limit: int
) -> list[list[int]]:
    """Return batches of matrices in which every rank computes.

    Args:
        owners: owner of each matrix.
        sizes: size of each matrix.
        ranks: number of ranks.
        limit: largest size of a rank's matrices in a batch, unless it is one matrix.
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
class ExchangePlan:
    """The owners of the matrices of several parameters.

    Attributes:
        items: the matrices, each as (parameter, matrix of its stack).
        owners: a rank of the grid for each matrix.
        costs: floating-point operations of each matrix.
        batches: indices of the matrices of each batch, in order.
    """

    items: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    costs: tuple[int, ...]
    batches: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def plan_exchange(
    params: tuple[MatrixParts, ...], flops: tuple[int, ...], loads: tuple[int, ...], width: int
) -> ExchangePlan:
    """Return the owners of all matrices of parameters that are sharded over the same ranks.

    Args:
        params: parts of each parameter.
        flops: floating-point operations for each matrix of a parameter.
        loads: current load of each rank, in floating-point operations.
        width: number of bytes of a sent element.
    """
    items = [
        (index, matrix) for index, param in enumerate(params) for matrix in range(len(param.parts))
    ]
    costs = [flops[index] for index, _ in items]
    held = [params[index].sizes[matrix] for index, matrix in items]
    owners = assign(costs, held, loads)
    sizes = [params[index].rows * params[index].columns * width for index, _ in items]
    ranks = params[0].grid.size
    share = sum(sizes) // (ranks * _BATCHES)
    limit = min(max(share, LEAST_BATCH_BYTES), BATCH_BYTES)
    together = exchange_batches(owners, sizes, ranks, limit)
    return ExchangePlan(tuple(items), tuple(owners), tuple(costs), tuple(map(tuple, together)))


class MatrixOwners:
    """Loads of the ranks in one step, over all launches of an optimizer, so that they are balanced.

    NOTE: only launches with sharded matrices are registered. All ranks with shards of them launch
    in one order, so they have the same loads.

    Attributes:
        flops: floating-point operations of this rank's products for sharded matrices in the last
            step.
        bytes_sent: number of bytes that this rank sent to other ranks for them.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._loads: dict[tuple[str, ...], list[int]] = {}
        self._reset()

    def _reset(self) -> None:
        self._seen.clear()
        self._loads.clear()
        self.flops = self.bytes_sent = 0

    def begin(self, keys: Iterable[Hashable]) -> None:
        """Start a launch. If a parameter occurs a second time, a new step starts.

        Args:
            keys: keys of the parameters with sharded matrices.
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
    ) -> ExchangePlan:
        """Assign the matrices of parameters that are sharded over the same ranks
        (:func:`plan_exchange`).

        Args:
            params: parts of each parameter.
            groups: process groups that span the grid of these ranks.
            flops: see :func:`plan_exchange`.
            width: see :func:`plan_exchange`.
        """
        grid = params[0].grid
        name = tuple(group.group_name for group in groups)
        loads = self._loads.setdefault(name, [0] * grid.size)
        planned = plan_exchange(tuple(params), tuple(flops), tuple(loads), width)
        (here,) = grid.block(*(group.rank() for group in groups))
        for owner, cost in zip(planned.owners, planned.costs, strict=True):
            loads[owner] += cost
            if owner == here:
                self.flops += cost
        return planned

    def metrics(self) -> dict[str, float]:
        """Return this rank's metrics of sharded matrices in the last step."""
        return {"muon_flops": self.flops, "bytes_exchanged": self.bytes_sent}
