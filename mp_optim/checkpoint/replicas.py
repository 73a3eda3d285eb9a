"""Parameters that several ranks hold under one name are written once, so they had better be the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mp_optim.checkpoint.ranks import Ranks

__all__ = ["check_replicas"]

SAMPLES = 64
"""Elements of a parameter that are compared, evenly spaced: enough to tell parts of a whole and experts from copies."""


def check_replicas(params: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raise, on every rank, if ranks hold different values under one name. Collective.

    Args:
        params: parameters by name, of which only plain tensors are looked at: a DTensor says itself what it is.

    Raises:
        ValueError: naming the parameter and the ranks.
    """
    if ranks.size == 1:
        return
    plain = {name: param for name, param in params.items()
             if type(param) in (Tensor, torch.nn.Parameter) and param.device.type != "meta"}
    found = ranks.gather({name: _digest(param) for name, param in plain.items()})
    ranks.first("comparing the ranks' parameters", lambda: _compare(found))


def _digest(param: Tensor) -> bytes:
    flat = param.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].contiguous().view(torch.uint8)
    return hashlib.sha256(bytes(sample.cpu().tolist())).digest()[:16]


def _compare(found: Sequence[Mapping[str, bytes]]) -> None:
    first: dict[str, tuple[int, bytes]] = {}
    for rank, digests in enumerate(found):
        for name, digest in digests.items():
            other, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"{name}: ranks {other} and {rank} hold different values under this name, of which one would be "
                    "lost. Give experts names of their own on every rank; save parts of tensors (tensor parallelism "
                    "without DTensor) with process_group= the ranks that hold copies, each under a path of its own")
