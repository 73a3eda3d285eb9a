"""Writes outside of a step, compared between the ranks that share parameters.

Copies that took other values would stay different for ever, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from mp_optim.checkpoint.flat import FlatShard
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.ranks.agreement import check_agreement
from mp_optim.update.checksums import checksums_of


@in_own_modes
def check_write(
    sharers: Iterable[tuple[str, tuple[ProcessGroup, ...]]],
    doing: str,
    values: Any,
    device: torch.device,
) -> None:
    """Compare what a call is given between the ranks that share parameters. Collective, once for
    each kind of sharing.

    Args:
        sharers: the name of each trained parameter here, and who shares it.
        doing: the call.
        values: by name. Those of no parameter here are compared with everyone.

    Raises:
        ValueError: ranks are given other values, naming them.
        MissingRanksError: a rank does something else, or is gone.
    """
    given = dict(values) if isinstance(values, Mapping) else {"all": values}
    named: dict[tuple[ProcessGroup, ...], set[str]] = {}
    for name, groups in sharers:
        named.setdefault(tuple(g for g in groups if g.size() > 1), set()).add(name)
    unknown = set(given).difference(*named.values())
    for groups, names in named.items():
        if groups:
            common = sorted((names | unknown) & given.keys(), key=str)
            lines = [f"{name}: {_described(given[name])}" for name in common]
            text = f"comparing what {doing} is given"
            check_agreement(groups, lines, device, text, f"parameters ({doing})", _THEN)


_THEN = "; nothing was changed"


def _described(value: Any) -> str:
    """A value to compare; of a part of one only that it is a part."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    text = f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, (DTensor, FlatShard)) or value.is_meta:
        return f"{type(value).__name__}, {text}"
    if value.layout != torch.strided or not value.is_floating_point():
        return f"{text}, {value.layout}"
    (checksum,) = checksums_of([value.detach().float().contiguous().view(-1)])
    ends = value.detach().float().aminmax() if value.numel() else ()
    least, most = (float(end) for end in ends) if ends else (0.0, 0.0)
    return f"{text} from {least:g} to {most:g}, checksum {checksum:08x}"
