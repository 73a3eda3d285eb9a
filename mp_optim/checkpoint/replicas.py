"""Parameters that several ranks hold under one name, which a checkpoint writes once."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from mp_optim.process_groups.agreement import Ranks

SAMPLES = 64
"""Elements of a parameter that are compared, evenly spaced: enough to distinguish parts of a whole
and experts from copies."""

# -- parameters that several ranks hold under one name --------------------------------------------
#
# They are written once, so they must be the same. While they are, a rank sends one digest of all of
# them; single parameters are compared only to name what differs.


def check_replicas(params: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raise, on every rank, if ranks hold different values under one name. Collective.

    Args:
        params: parameters by name, of which only plain tensors are compared: a DTensor says itself
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
    names = hashlib.sha256("\n".join(plain).encode()).digest()
    reports = ranks.gather((names, _digest(list(plain.values()))))
    backwards = reversed(list(enumerate(reports)))
    kinds = {kind: rank for rank, (kind, _) in backwards}  # the first rank of each
    if ranks.broadcast(len(set(reports)) < 2):
        return
    speakers = ranks.broadcast(set(kinds.values()))
    spoken = ranks.gather(tuple(plain) if ranks.rank in speakers else ())
    names_of = {kind: spoken[rank] for kind, rank in kinds.items()}
    compared = ranks.broadcast(to_compare(reports, names_of))
    own = {name: _digest([param]) for name, param in plain.items() if name in compared}
    digests = ranks.gather(own)
    ranks.run_on_first("comparing the ranks' parameters", lambda: _compare(digests))


def to_compare(
    reports: Sequence[tuple[bytes, bytes]], names: Mapping[bytes, Sequence[str]]
) -> set[str]:
    """Names of parameters that ranks may hold different values of.

    Args:
        reports: of every rank, digests of the names of what it holds whole, and of the values.
        names: the parameters behind each digest of names.
    """
    values: dict[bytes, set[bytes]] = {}
    for kind, value in reports:
        values.setdefault(kind, set()).add(value)
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
        samples.setdefault((param.device, param.dtype), []).append(flat[::step][:SAMPLES])
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
