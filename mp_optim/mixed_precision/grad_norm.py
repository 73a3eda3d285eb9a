"""Measure gradients, and agree on the norm: one read of every gradient, then one reduction of a few
scalars.

The result is a sum of squares for each norm group. The additions are in FP64 and in a fixed order,
so the result does not depend on threads, buckets or places. An inf or nan in any gradient makes the
sum non-finite, so no second pass over the gradients is needed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.core import CachedTensorList
from mp_optim.kernels import choose_backend
from mp_optim.kernels.sums import Groups, index_on, reduce_over, reduce_rows, sum_in_pairs

MAIN_NORM = "main"
EXCLUDED = "excluded"
"""Norm group of gradients that another rank counts. Such gradients are checked for inf and nan, and
the norm leaves them out."""
_AGREEING = "agreeing on the gradient norm"


@dataclass(frozen=True)
class NormKey:
    """The norm group in which a gradient counts, by name, and the process groups over which the
    gradient's parameter is split."""

    group: str = MAIN_NORM
    shard_groups: tuple[ProcessGroup, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """Sums over the gradients of a step.

    Attributes:
        sums: sum of squares for each norm group, FP64, shape ().
        zeros: number of zero gradient elements, FP64; None if they were not counted.
        disagreement: 0 if the ranks that share parameters would step them alike, else a positive
            number; None if there is nothing to compare.
        params: sum of squares of each parameter's gradient, FP64, shape (slots,), 0 without a
            gradient; None if these sums are not kept.
        known: the sums as numbers, in place of ``sums``, if only the host needs them; else None.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    zeros: Tensor | None = None
    disagreement: Tensor | None = None
    params: Tensor | None = None
    known: Mapping[str, float] | None = None

    def __add__(self, other: Measurement) -> Measurement:
        sums = dict(self.sums)
        for name, value in other.sums.items():
            sums[name] = sums[name] + value.to(sums[name].device) if name in sums else value
        given = [value for value in (self.params, other.params) if value is not None]
        params = torch.cat([value.to(given[0].device) for value in given]) if given else None
        zeros = _total([self.zeros, other.zeros])
        return Measurement(sums, zeros, _total([self.disagreement, other.disagreement]), params)


def _total(values: Sequence[Tensor | None]) -> Tensor | None:
    given = [value for value in values if value is not None]
    return sum((value.to(given[0].device) for value in given[1:]), given[0]) if given else None


def measure(grads: Sequence[Tensor], fused_backend: str, device: torch.device) -> Tensor:
    """Return the sum of squares of each gradient: FP64, shape (n,), on ``device``.

    Args:
        grads: this step's local gradients; each is read where it is.
        fused_backend: backend whose kernels measure.
        device: device of the result.
    """
    if not isinstance(grads, CachedTensorList):
        grads = CachedTensorList(grads)
    if len(grads.devices) == 1:
        backend, _ = choose_backend(fused_backend, grads[0].device)
        return backend.sum_of_squares(grads).to(device)
    sums = torch.zeros(len(grads), dtype=torch.float64, device=device)
    for where in grads.devices:
        here = [index for index, grad in enumerate(grads) if grad.device == where]
        some = [grads[index] for index in here]
        sums[index_on(device, tuple(here))] = measure(some, fused_backend, device)
    return sums


def measure_rest(
    grads: Sequence[Tensor],
    known: Sequence[float | None],
    held: Sequence[bool],
    fused_backend: str,
    device: torch.device,
) -> Tensor:
    """Return the sum of squares of each gradient: FP64, shape (n,), on ``device``. Known sums are
    not measured again.

    Args:
        grads: local gradients.
        known: the sum of squares of each gradient, or None.
        held: for each gradient, True if it is a copy in host memory. A launch reads only one kind
            of memory, so such copies are measured separately.
        fused_backend: backend whose kernels measure.
        device: device of the result.
    """
    rest = [index for index, value in enumerate(known) if value is None]
    numbers = [value or 0.0 for value in known]
    sums = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(device)
    for are_held in (True, False):
        some = [index for index in rest if held[index] is are_held]
        if some:
            left = [grads[index] for index in some]
            sums[index_on(device, tuple(some))] = measure(left, fused_backend, device)
    return sums


def total_by_key(
    sums: Tensor, keys: Sequence[NormKey], all_keys: Sequence[NormKey], fused_backend: str
) -> dict[NormKey, Tensor]:
    """Return the sum of squares for each norm key: FP64, shape ().

    Args:
        sums: sum of squares of each local gradient, in slot order.
        keys: norm key of each gradient.
        all_keys: every norm key of the model, also keys without a gradient now, so that all ranks
            reduce alike.
        fused_backend: backend whose kernels add.
    """
    add = choose_backend(fused_backend, sums.device)[0].sum_in_pairs
    if len(all_keys) == 1:
        return {all_keys[0]: add(sums)}
    members: dict[NormKey, list[int]] = {key: [] for key in all_keys}
    for index, key in enumerate(keys):
        members[key].append(index)
    return {key: add(sums[index_on(sums.device, tuple(some))]) for key, some in members.items()}


_FEW = 256
"""Python adds up to this many numbers faster than torch does."""


def pairwise_sum_on_host(values: Tensor) -> float:
    """Return the sum of FP64 numbers on the host, with the order of additions of
    :func:`sum_in_pairs`."""
    if values.numel() > _FEW:
        return float(sum_in_pairs(values))
    numbers: list[float] = values.tolist()
    while len(numbers) > 1:
        if len(numbers) % 2:
            numbers.append(0.0)
        numbers = list(map(operator.add, numbers[0::2], numbers[1::2]))
    return numbers[0] if numbers else 0.0


def count_zeros(
    grads: Sequence[Tensor],
    keys: Sequence[NormKey],
    all_keys: Sequence[NormKey],
    device: torch.device,
) -> dict[NormKey, Tensor]:
    """Return the number of zero elements by norm key: FP64, shape (), on ``device``."""
    zeros = {key: torch.zeros((), dtype=torch.float64, device=device) for key in all_keys}
    counted: dict[NormKey, list[Tensor]] = {}
    for grad, key in zip(grads, keys, strict=True):
        if key.group != EXCLUDED:
            counted.setdefault(key, []).append(grad)
    for key, members in counted.items():
        numel = sum(grad.numel() for grad in members)
        others = [torch.count_nonzero(grad).to(device) for grad in members]
        zeros[key] += numel - torch.stack(others).sum()
    return zeros


def agree(
    local: dict[NormKey, Tensor],
    zeros: dict[NormKey, Tensor] | None,
    group: ProcessGroup | None,
    names: Sequence[str],
    numbers: Mapping[NormKey, int] | None = None,
    copies: Mapping[NormKey, Iterable[ProcessGroup]] | None = None,
    params: Tensor | None = None,
) -> Measurement:
    """Reduce sums over the shard groups of each key, then over a group of ranks. Collective.

    Args:
        local: sum of squares of this rank's gradients for each norm key.
        zeros: number of zero gradient elements for each key, or None.
        group: the ranks that agree on the norm; None for this process alone.
        names: sorted names of the norm groups of all ranks of ``group``.
        numbers: for some keys, a number that must be equal on the ranks that share parameters.
        copies: for some keys, further groups of ranks on which this number must be equal.
        params: sum of squares of each parameter's gradient, or None; returned unchanged.

    Raises:
        ValueError: a gradient counts in a norm group that is not in ``names``.
        MissingRanksError: a rank did not take part; the message names the ranks that did not
            report.
    """
    device = next((value.device for value in local.values()), torch.device("cpu"))
    rows = torch.zeros(len(names) + 2, dtype=torch.float64, device=device)
    totals = dict(zip(names, rows.unbind(), strict=False))
    off, counted = rows[-2], rows[-1]
    compares = group is not None
    for key, value in local.items():
        if key.group not in totals:
            raise ValueError(
                f"grad_norm_group={key.group!r}: the group was set after the first step, when the "
                f"ranks had agreed on {list(names)}; set it before the optimizer is built"
            )
        number = None if numbers is None else numbers.get(key)
        if zeros is None and number is None and not key.shard_groups:
            # No other rank has a shard of these parameters, so the sum is complete.
            totals[key.group] += value
            continue
        # Always reduce two scalars. A rank that counts zeros may share parameters with a rank that
        # does not, and both must reduce the same number of scalars.
        values = [value, torch.zeros_like(value) if zeros is None else zeros[key]]
        packed, difference = _over_shards(key, values, number, list((copies or {}).get(key, ())))
        if difference is not None:
            off += difference
            compares = True
        totals[key.group] += packed[0]
        counted += packed[1]
    if group is not None:
        reduce_over((group,), rows, _AGREEING)
    return Measurement(
        totals, None if zeros is None else counted, off if compares else None, params
    )


def _over_shards(
    key: NormKey, values: Sequence[Tensor], number: int | None, copies: Sequence[ProcessGroup]
) -> tuple[Tensor, Tensor | None]:
    """Sum scalars over the shard groups of a norm key. Collective.

    Args:
        key: the norm key.
        values: the scalars.
        number: a number that must be equal on the ranks of the shard groups and of ``copies``; None
            for no comparison.
        copies: further groups of ranks that must have the same number.

    Returns:
        The sums; and 0 if the number is equal on all ranks, a positive number if it differs, or
            None without a number.
    """
    ranks = math.prod(group.size() for group in (*key.shard_groups, *copies))
    terms: tuple[int, ...] = ()
    if number is not None:
        # Compare only as many low bits as FP64 can sum exactly over these ranks, also squared. If
        # both sums equal the sums of equal numbers, all numbers are equal (Cauchy and Schwarz).
        kept = number & ((1 << (53 - ranks.bit_length()) // 2) - 1)
        terms = kept, kept * kept
    packed = torch.stack([*values, *(torch.full_like(values[0], term) for term in terms)])
    reduce_over(key.shard_groups, packed, _AGREEING)
    if not terms:
        return packed, None
    reduce_over(copies, packed[-2:], _AGREEING)
    total, squares = packed[-2:]
    term, square = terms
    return packed, (total - float(ranks * term)).abs() + (squares - float(ranks * square)).abs()


def of_parameters(sums: Tensor, indices: Sequence[int], split_over: Sequence[Groups]) -> Tensor:
    """Return the sum of squares of each whole parameter's gradient: FP64, shape (slots,), 0 without
    a gradient. Collective, once for each kind of sharding.

    Args:
        sums: sums of squares of the local gradients.
        indices: indices of the slots that have a gradient, in slot order.
        split_over: for every slot, the groups of ranks over which its gradient is split.
    """
    if len(indices) == len(split_over):
        of_slots = sums.clone()
    else:
        of_slots = sums.new_zeros(len(split_over))
        of_slots[index_on(sums.device, tuple(indices))] = sums
    reduce_rows(of_slots, split_over, "agreeing on the gradient norms of parameters")
    return of_slots
