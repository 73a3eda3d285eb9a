"""Write publications as folders for engines that patch a checkpoint on their disk: ``pull_weights``
of SGLang and vLLM, for slime, miles and vime."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mp_optim.apps.deltas.publications import (
    Weights,
    complete_parts,
    named_tensors,
    published_elements,
)
from mp_optim.core.weight_delta import WeightDelta, safetensors_file, tensor_bytes

_FILE = "model-00000-of-00001.safetensors"
_MOST_BYTES = 1 << 32


def save_disk_version(
    folder: str | os.PathLike[str],
    delta: WeightDelta | Sequence[WeightDelta],
    weights: Weights,
    *,
    version: int,
    compress: Callable[[bytes], bytes],
) -> Path:
    """Write a publication for ``pull_weights`` of SGLang and vLLM, as the folder
    ``weight_v<version>``. The folder has positions and values of changed bytes (the encoding
    "overwrite" of slime, miles and vime), and appears under this name when all files are written.

    Args:
        folder: the folder with all versions.
        delta: a publication with changes, or the parts of all ranks.
        weights: the published weights: a module of plain parameters, or tensors by name. The names,
            shapes and dtypes are those of the engines' checkpoint.
        version: number of the version, from 1. Engines apply a version to a checkpoint of
            ``version - 1``; their first checkpoint is version 0.
        compress: a function that returns a zstd frame with the size of its content, such as
            ``zstandard.ZstdCompressor(level=1).compress``.

    Returns:
        The folder of the version.

    Raises:
        ValueError: the publication is full, parts are missing, the weights differ from the
            published values, or a weight has 4 GiB or more.
        FileExistsError: the folder of this version exists; nothing was written.
    """
    parts, tensors = complete_parts(delta), named_tensors(weights)
    target = Path(folder) / f"weight_v{version:06d}"
    if parts[0].is_full:
        raise ValueError(
            f"delta: publication {parts[0].number} has all weights, but this function writes only "
            f"changes; write all weights with save_pretrained() to {target}"
        )
    changes = published_elements(parts, tensors)
    payloads = {name: compress(_overwrites(name, tensors[name], changes[name])) for name in changes}
    index = {
        "metadata": {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": "overwrite",
            "compression_format": "zstd",
            "checksum_format": "adler32",
        },
        "weight_map": dict.fromkeys(payloads, _FILE),
    }
    checksums = {name: f"{zlib.adler32(tensor_bytes(tensors[name])):08x}" for name in payloads}
    files = {_FILE: payload_file(payloads, checksums)}
    write_folder(target, files | {"model.safetensors.index.json": json.dumps(index).encode()})
    return target


def payload_file(payloads: Mapping[str, bytes], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file with each payload as a uint8 tensor."""
    tensors = {
        name: torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        for name, payload in payloads.items()
    }
    return safetensors_file(tensors, metadata)


def write_folder(target: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder under a temporary name, and rename it to ``target`` when it is complete.

    Raises:
        FileExistsError: ``target`` exists; nothing was written.
    """
    if target.exists():
        raise FileExistsError(
            f"{target} exists, and engines may have read it; pass the next version number"
        )
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (temporary / name).write_bytes(content)
    os.replace(temporary, target)


def _overwrites(name: str, tensor: Tensor, elements: Tensor | None) -> bytes:
    """Return the payload of a tensor: the number of changed bytes, the position of each byte, and
    the bytes. Number and positions are little-endian uint32."""
    if tensor.nbytes >= _MOST_BYTES:
        raise ValueError(
            f"weights: {name} has {tensor.nbytes} bytes, but the format's 32-bit positions need a "
            f"tensor of fewer than {_MOST_BYTES} bytes; split {name} in the checkpoint"
        )
    flat, size = tensor.detach().reshape(-1), tensor.element_size()
    elements = torch.arange(flat.numel(), device=flat.device) if elements is None else elements
    positions = elements[:, None] * size + torch.arange(size, device=flat.device)
    count = torch.tensor([positions.numel()], device="cpu")
    numbers = torch.cat([count, positions.cpu().view(-1)]).to(torch.uint32)
    return tensor_bytes(numbers) + tensor_bytes(flat[elements])
