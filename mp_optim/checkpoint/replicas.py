"""Parameters that several ranks hold under one name are written once, so they had better be the
same.

While they are, a rank tells of one digest for all of them; the parameters are looked at one by one
only to name what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mp_optim.checkpoint.ranks import Ranks

SAMPLES = 64
"""Elements of a parameter that are compared, evenly spaced: enough to tell parts of a whole and
experts from copies."""


@dataclass(frozen=True)
class Told:
    """What a rank tells of the parameters it holds whole: digests of their names, and of their
    values."""

    names: bytes
    values: bytes


def check_replicas(params: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raise, on every rank, if ranks hold different values under one name. Collective.

    Args:
        params: parameters by name, of which only plain tensors are looked at: a DTensor says itself
            what it is.

    Raises:
        ValueError: naming the parameter and the ranks.
    """
    if ranks.size == 1:
        return
    plain = {
        name: param
        for name, param in params.items()
        if type(param) in (Tensor, torch.nn.Parameter) and param.device.type != "meta"
    }
    told = ranks.gather(told_of(plain))
    backwards = reversed(list(enumerate(told)))
    kinds = {one.names: rank for rank, one in backwards}  # the first rank of each
    if ranks.broadcast(len(set(told)) < 2):
        return
    speakers = ranks.broadcast(set(kinds.values()))
    names = ranks.gather(tuple(plain) if ranks.rank in speakers else ())
    names_of = {kind: names[rank] for kind, rank in kinds.items()}
    compared = ranks.broadcast(to_compare(told, names_of))
    own = {name: _digest([param]) for name, param in plain.items() if name in compared}
    digests = ranks.gather(own)
    ranks.first("comparing the ranks' parameters", lambda: _compare(digests))


def told_of(plain: Mapping[str, Tensor]) -> Told:
    """What a rank tells of its parameters; they are brought to the host together."""
    return Told(
        hashlib.sha256("\n".join(plain).encode()).digest(),
        _digest(list(plain.values())),
    )


def to_compare(told: Sequence[Told], names: Mapping[bytes, Sequence[str]]) -> set[str]:
    """Names of parameters that ranks may hold different values of.

    Args:
        told: by every rank.
        names: the parameters behind each digest of names.
    """
    values: dict[bytes, set[bytes]] = {}
    for one in told:
        values.setdefault(one.names, set()).add(one.values)
    seen: set[str] = set()
    compared: set[str] = set()
    for kind, held in names.items():
        compared |= set(held) if len(values[kind]) > 1 else seen.intersection(held)
        seen |= set(held)
    return compared


def _digest(params: Collection[Tensor]) -> bytes:
    """Of samples of the values, one after the other; one copy for each device and dtype."""
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        flat = param.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        samples.setdefault((param.device, param.dtype), []).append(
            flat[::step][:SAMPLES]
        )
    digest = hashlib.sha256()
    for (_, dtype), pieces in samples.items():
        content = torch.cat(pieces).view(torch.uint8).cpu()
        digest.update(str(dtype).encode() + bytes(content.tolist()))
    return digest.digest()[:16]


def _compare(digests_of_ranks: Sequence[Mapping[str, bytes]]) -> None:
    first: dict[str, tuple[int, bytes]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for name, digest in digests.items():
            other, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"{name}: ranks {other} and {rank} hold different values under this name, of "
                    "which one would be lost. If they are parts of one tensor, set Megatron's "
                    "tensor_model_parallel, partition_dim and partition_stride on it, and "
                    "process_groups.tp (of experts: expert_tp); if they are experts or layers that "
                    "every rank counts from 0, set process_groups.ep or pp, for names like "
                    "Megatron's; else say with global_names= what each is called in the whole "
                    "model. All of these are arguments of get_megatron_optimizer (without an "
                    "optimizer, of ModelParallel.of, for model_parallel=)"
                )
