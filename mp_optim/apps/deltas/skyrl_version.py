"""Write publications as folders that SkyRL's inference workers fetch: the XOR of old and new bytes,
and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mp_optim.apps.deltas.disk_version import payload_file, write_folder
from mp_optim.apps.deltas.publications import (
    Position,
    Weights,
    check_patch,
    named_tensors,
    next_parts,
    patches_by_name,
    position_of,
)
from mp_optim.apps.deltas.receiver import write_patch
from mp_optim.core.weight_delta import WeightDelta, as_integers, tensor_bytes

_FILE = "delta.safetensors"


@torch.no_grad()
def save_skyrl_version(
    folder: str | os.PathLike[str],
    delta: WeightDelta | Sequence[WeightDelta],
    replica: Weights,
    after: Position | None = None,
    *,
    version: int,
    compress: Callable[[bytes], bytes],
) -> Position:
    """Write a publication as the folder ``delta-<version>`` of SkyRL's ``sync_dir``, then apply the
    publication to ``replica``. The folder appears under its name when all files are written.

    SkyRL's deltas are the XOR of old and new bytes, so this function needs the old weights. Call it
    in any process that has the publications; the trainer itself stores no copy. After a restart,
    pass a replica of ``version - 1`` and a full publication.

    Args:
        folder: SkyRL's ``sync_dir``.
        delta: a publication with changes or with all weights, or the parts of all ranks.
        replica: the weights of ``version - 1``, with the names, shapes and dtypes of the workers'
            checkpoint: a module of plain parameters, or tensors by name.
        after: result of the previous call; None before the first.
        version: number of the version, from 1. Version 0 is the workers' base checkpoint.
        compress: a function that returns a zstd frame, such as
            ``zstandard.ZstdCompressor(level=1).compress``.

    Returns:
        The position of ``replica``, for the next call.

    Raises:
        ValueError: as :func:`mp_optim.apply_delta`, or ``version`` is not an integer from 1;
            nothing was written.
        FileExistsError: the folder of this version exists; nothing was written.
    """
    if type(version) is not int or version < 1:
        raise ValueError(
            f"version={version!r}: versions are integers from 1, because version 0 is the workers' "
            "base checkpoint; pass the number of the replica's version plus 1"
        )
    target = Path(folder) / f"delta-{version:08d}"
    if target.exists():
        raise FileExistsError(
            f"version={version}: {target} exists and is complete; pass version={version + 1} and a "
            f"replica of version {version} (after an interrupt, the replica may have older "
            "weights: build it from the base checkpoint and all folders, and pass a full "
            "publication)"
        )
    parts, tensors = next_parts(delta, after), named_tensors(replica)
    found = patches_by_name(parts)
    for patch in [patch for patches in found.values() for patch in patches]:
        check_patch(patch, tensors)
    payloads: dict[str, bytes] = {}
    records: list[dict[str, Any]] = []
    for name, patches in found.items():
        old, new = tensors[name].detach(), tensors[name].detach().clone()
        for patch in patches:
            write_patch(patch, new)
        changed_bits = as_integers(old.reshape(-1)) ^ as_integers(new.reshape(-1))
        if not changed_bits.any():
            continue
        payloads[name] = compress(tensor_bytes(changed_bits))
        records.append(
            {
                "name": name,
                "dtype": str(new.dtype).removeprefix("torch."),
                "shape": list(new.shape),
                "uncompressed_num_bytes": new.nbytes,
                "compressed_num_bytes": len(payloads[name]),
                "payload_file": _FILE,
                "payload_key": name,
                "checksum": hashlib.sha256(tensor_bytes(new)).hexdigest(),
                "checksum_algorithm": "sha256",
            }
        )
    manifest = {
        "version": version,
        "base_version": version - 1,
        "tensors": records,
        "total_uncompressed_num_bytes": sum(one["uncompressed_num_bytes"] for one in records),
        "total_compressed_num_bytes": sum(map(len, payloads.values())),
        "payload_files": [_FILE],
    }
    files = {_FILE: payload_file(payloads, {}), "manifest.json": json.dumps(manifest).encode()}
    write_folder(target, files)
    for name, patches in found.items():
        for patch in patches:
            write_patch(patch, tensors[name])
    return position_of(parts)
