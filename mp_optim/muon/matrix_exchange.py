"""Exchange of matrices that are sharded over ranks.

Each matrix has an owner, the rank that orthogonalizes it. All ranks send their parts of a matrix to
its owner, and the owner sends parts of the result back. One all-to-all sends a batch of matrices.
If several process groups span the ranks as a grid, one all-to-all runs along each axis in turn, so
no process group over all ranks is needed.

NOTE: batches overlap. While the products of a batch are computed, parts of the next batch are
received and results of the previous batch are sent. All ranks start collectives in the same order,
because all compute the same plan (:func:`plan_exchange`).
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
"""Flattened parts of each matrix, by the matrix's index in the plan. A list has the parts of
consecutive ranks, in order."""

_DOING = "exchanging parts of matrices with their owners"


@dataclass
class Exchange:
    """An exchange of the parts of several parameters between the same ranks.

    Attributes:
        plan: owner and batch of each matrix.
        params: for each parameter, the parts of each rank.
        groups: process groups that span the grid of these ranks.
        sent: this rank's parts of the parameters, contiguous.
        received: memory for this rank's parts of the results, contiguous.
        device: device of collectives and products.
        compute: function that returns the results of whole matrices, with equal shapes and the
            dtype of ``received``.
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
        # This rank's coordinates along the grid's axes decide which parts the rank sends.
        self._here = tuple(group.rank() for group in self.groups)
        (self._rank,) = self._grid.block(*self._here)
        # Compute the owners' coordinates once, because every stage of a batch reads them.
        self._owners = list(map(self._grid.coordinates, self.plan.owners))
        for param, part in zip(self.params, self.sent, strict=True):
            if (there := param.bounds(self._rank)[-1]) != part.numel():
                raise ValueError(
                    f"sent={part.numel()} elements: this rank's part of {len(param.parts)} "
                    f"matrices of {param.rows} x {param.columns} has {there}; pass the whole part"
                )

    def run(self) -> None:
        """Send all parts, compute this rank's matrices, and receive all results. Collective over
        the grid."""
        waiting = map(self._steps, self.plan.batches)
        under_way: list[Iterator[bool]] = []
        while begun := [*itertools.islice(waiting, 1), *under_way]:
            # Start with the newest batch, so that its parts are sent during the products of an
            # older batch.
            under_way = [batch for batch in begun if next(batch)]

    def _steps(self, batch: Sequence[int]) -> Iterator[bool]:
        """Run the stages of a batch. Yield True while a collective is in progress, and False at the
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
        """Compute the results of this rank's matrices, and return them cut into the parts of each
        rank."""
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
        """Return this rank's flattened part of a matrix, as a view of its parameter's tensor.

        Args:
            tensors: one tensor for each parameter.
            item: index of the matrix in the plan.
        """
        param, matrix = self.plan.items[item]
        start, stop = self.params[param].bounds(self._rank)[matrix : matrix + 2]
        return tensors[param].view(-1)[start:stop]

    # -- collectives ------------------------------------------------------------------------------

    def _to_owners(self, axis: int, batch: Sequence[int], pieces: _Pieces) -> _Hop:
        """Send parts of matrices toward their owners, along one axis of the grid.

        Each rank of the axis receives the parts for all owners with the rank's coordinate along
        this axis. Exchanges along earlier axes then send these parts to the owner.
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
        """Send parts of results back from the owners, along one axis of the grid.

        Each rank of the axis receives the parts for all ranks with its coordinates along this axis
        and earlier axes.
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
        """Return (matrix, number of elements) for each part of some matrices on some ranks."""
        found = []
        for item in items:
            param, matrix = self.plan.items[item]
            sizes = self.params[param].sizes[matrix]
            found += [(item, sizes[rank]) for rank in ranks]
        return found


class _Hop:
    """One all-to-all of parts along one axis of the grid, which the constructor starts.

    Args:
        group: process group of the axis.
        device: device of the collective.
        dtype: dtype of the parts.
        sent: for each rank of the group, the parts to send.
        coming: for each rank of the group, matrix and number of elements of each part to receive.

    Attributes:
        bytes_sent: number of bytes sent to other ranks.
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
        # The collective reads this buffer until its end, so keep a reference.
        self._packed = packed.to(device)
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
        """Wait for the collective, and return the received parts of each matrix on a device, in the
        order of ranks."""
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
    """Return a whole matrix, assembled from the flattened part of each rank."""
    if _are_in_order(parts, shape[1]):
        return torch.cat(list(flats)).view(shape)
    whole = flats[0].new_empty(shape)
    for part, flat in zip(parts, flats, strict=True):
        for box, values in box_views(flat, part):
            box.of(whole).copy_(values)
    return whole


def cut_matrix(whole: Tensor, parts: Sequence[Boxes]) -> list[Tensor]:
    """Return the flattened part of each rank of a whole matrix. Inverse of :func:`assembled`."""
    if _are_in_order(parts, whole.shape[1]):
        return list(torch.split(whole.reshape(-1), list(map(numel_of, parts))))
    flats = []
    for part in parts:
        boxes = [box.of(whole).reshape(-1) for box in part]
        flats.append(torch.cat(boxes) if boxes else whole.new_empty(0))
    return flats


def _are_in_order(parts: Sequence[Boxes], columns: int) -> bool:
    """True if the parts are runs of whole rows of a matrix, in order."""
    end = 0
    for box in itertools.chain.from_iterable(parts):
        (row, column), (high, wide) = box.offsets, box.sizes
        if box.numel and (row * columns + column != end):
            return False
        if high > 1 and wide != columns:
            return False
        end += box.numel
    return True


# -- owners of matrices: computed from integers, so that every rank has the same plan --------------

BATCH_BYTES = 64 << 20
"""Largest number of bytes of whole matrices that a rank receives in a batch. A larger matrix is the
only matrix that its owner receives in a batch."""
LEAST_BATCH_BYTES = 1 << 20
"""Smallest limit in bytes of a batch. Between this number and :data:`BATCH_BYTES`, the limit is a
quarter of a rank's average bytes. With four batches, three are received while products are
computed."""
_BATCHES = 4


def newton_schulz_flops(rows: int, columns: int, steps: int, method: str = "standard") -> int:
    """Return the number of floating-point operations of the products for one matrix.

    A multiplication and an addition count as two operations.

    Args:
        rows: rows of the matrix.
        columns: columns of the matrix.
        steps: number of Newton-Schulz steps.
        method: see :func:`~mp_optim.muon.newton_schulz.orthogonalize_each`.
    """
    short, long = sorted((rows, columns))
    if method == "gram" and long >= 2 * short:
        made_anew = 1 + steps // 2
        small = 2 * made_anew + 8 * (steps - made_anew)
        return made_anew * 4 * short * short * long + small * short**3
    return steps * (4 * short * short * long + 2 * short**3)


def assign(costs: Sequence[int], held: Sequence[Sequence[int]], loads: Sequence[int]) -> list[int]:
    """Return the owner of each matrix, so that all ranks have about the same load.

    The most expensive remaining matrix is assigned to the rank with the smallest load (Graham's LPT
    rule). Of ranks with equal load, the rank with most elements of the matrix is chosen.

    Args:
        costs: cost of each matrix.
        held: for each matrix, the number of its elements on each rank.
        loads: present load of each rank.

    Returns:
        A rank for each matrix. The loads of two ranks differ by at most the largest cost, unless
        the loads of these ranks differed by more before.
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
    """Divide matrices into batches: the first batch has the first matrices of every rank, and so
    on.

    So all ranks compute products in the same batches, if they own about equally many bytes.

    Args:
        owners: owner of each matrix.
        sizes: size of each matrix in bytes.
        ranks: number of ranks.
        limit: largest number of bytes of a rank's matrices in a batch. A larger matrix is its
            owner's only matrix in a batch.

    Returns:
        Indices of the matrices of each batch.
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
    """Owners and batches of the matrices of several parameters.

    Attributes:
        items: for each matrix, the index of its parameter, and its index in the parameter's stack.
        owners: for each matrix, the rank in the grid that orthogonalizes the matrix.
        costs: number of floating-point operations of each matrix.
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
    """Assign the matrices of parameters that are sharded over the same ranks to owners.

    Args:
        params: for each parameter, the parts of each rank.
        flops: for each parameter, the number of floating-point operations of one of its matrices.
        loads: present load of each rank, in floating-point operations.
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
    """Loads of all ranks in one step, which balance the owners of matrices over all launches of the
    step.

    NOTE: only launches with sharded matrices add to the loads. The ranks with shards make these
    launches in one order, so all these ranks compute equal loads.

    Attributes:
        flops: number of floating-point operations of this rank's products for sharded matrices in
            the last step.
        bytes_sent: number of bytes of sharded matrices that this rank sent in the last step.
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
        """Start a launch, and reset loads and counters if the launch belongs to a new step.

        A step launches each parameter once, so a key that was launched before shows a new step.

        Args:
            keys: keys of the launch's parameters with sharded matrices.
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
        """Assign matrices to owners (:func:`plan_exchange`), and add their costs to the loads.

        Args:
            params: parameters that are sharded over the same ranks: for each, the parts of each
                rank.
            groups: process groups that span the grid of these ranks.
            flops: for each parameter, the number of floating-point operations of one of its
                matrices.
            width: number of bytes of a sent element.
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
        """Return this rank's operations and sent bytes for sharded matrices in the last step."""
        return {"muon_flops": self.flops, "bytes_exchanged": self.bytes_sent}
