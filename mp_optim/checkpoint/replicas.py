"""Parameters that several ranks hold under one name, which a checkpoint writes once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mp_optim.checkpoint.file_format import byte_view
from mp_optim.process_groups.agreement import Ranks

SAMPLES = 64
"""Elements of a parameter that are compared, evenly spaced: enough to distinguish parts of a whole
and experts from copies."""


def check_replicas(params: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raise, on every rank, if ranks hold different values under one name. Collective.

    Such parameters are written once, so they must be equal. A rank whose digests equal those of the
    first rank does not send them.

    Args:
        params: parameters by name. Only plain tensors are compared: a DTensor has its own layout.
        ranks: the ranks that save.

    Raises:
        ValueError: values differ, naming the parameter and the ranks.
    """
    if ranks.size == 1:
        return
    own = _digests(
        {
            name: param
            for name, param in params.items()
            if type(param) in (Tensor, torch.nn.Parameter) and param.device.type != "meta"
        }
    )
    others = ranks.gather_differing(own, repr(own))
    ranks.run_on_first("comparing the ranks' parameters", lambda: _compare([own, *others[1:]]))


def _digests(params: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return a digest of samples of each parameter; one copy for each device and dtype."""
    samples: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, param in params.items():
        flat = param.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        samples.setdefault((param.device, param.dtype), {})[name] = flat[::step][:SAMPLES]
    digests: dict[str, bytes] = {}
    for (_, dtype), pieces in samples.items():
        content = torch.cat([*pieces.values()]).view(torch.uint8).cpu()
        of_each = torch.split(content, [piece.nbytes for piece in pieces.values()])
        for name, part in zip(pieces, of_each, strict=True):
            text = str(dtype).encode() + bytes(byte_view(part))
            digests[name] = hashlib.sha256(text).digest()[:8]
    return digests


def _compare(digests_of_ranks: Sequence[Mapping[str, bytes] | None]) -> None:
    first: dict[str, tuple[int, bytes]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for name, digest in (digests or {}).items():
            other, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"{name}: ranks {other} and {rank} have different values under this name, and "
                    "one of them would be lost. For parts of one tensor, set Megatron's "
                    "tensor_model_parallel, partition_dim and partition_stride on it, and "
                    "process_groups.tp (for experts expert_tp). For experts that every rank "
                    "counts from 0, set process_groups.ep. For layers, set process_groups.pp and "
                    "a layer_number on each layer. Otherwise pass global_names=, a function that "
                    "returns the name in the whole model. All of these are arguments of "
                    "get_megatron_optimizer (without an optimizer, of ModelParallel.of, for "
                    "model_parallel=)"
                )
