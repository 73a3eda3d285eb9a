"""Weight deltas: the elements of a model's weights that changed since the last publication, as
tensors and as bytes. :mod:`mp_optim.apps.deltas` applies deltas in another process.

The bytes are a safetensors file with the keys and metadata of TRL's sparse patches
(huggingface/trl#5937). ``<name>.idx`` has the gaps between ascending indices, and ``<name>.val``
has the values. If all values of a parameter are given, the key is ``<name>``. This package adds
metadata. If a bitmap of the changed elements is smaller than the gaps, the file has ``<name>.bits``
in place of ``<name>.idx``.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FORMAT = "sparse_weight_patch"
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_SHORT_GAP = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class WeightPatch(NamedTuple):
    """New values of one parameter. The fields are those of vLLM's ``CheckpointWeightPatch``, in the
    same order.

    Attributes:
        name: FQN of the parameter.
        shape: shape of the whole parameter.
        dtype: dtype of the whole parameter.
        values: the new values, 1-D.
        indices: ascending int64 index of each value in the row-major flattened parameter; None if
            all elements are given.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    def positions(self) -> Tensor:
        """Return the index of each value, also where ``indices`` is None."""
        if self.indices is not None:
            return self.indices
        return torch.arange(self.values.numel(), device=self.values.device)


@dataclass(frozen=True, eq=False)
class WeightDelta:
    """One publication of a rank: the new values of this rank's part of the weights.

    Attributes:
        run: name of the series of publications that a call of ``track_changes()`` starts.
        number: number of the publication, from 1.
        is_full: True if the delta has all values of the part, changed or not.
        part: index of this part of the model.
        parts: number of parts.
        watched: number of tracked elements, changed or not.
        patches: one entry for each parameter with new values. The tensors are copies.
    """

    run: str
    number: int
    is_full: bool
    part: int
    parts: int
    watched: int
    patches: tuple[WeightPatch, ...]

    @property
    def changed(self) -> int:
        """Number of values in the delta."""
        return sum(patch.values.numel() for patch in self.patches)

    def to_bytes(self, *, bitmaps: bool = True) -> bytes:
        """Return the delta as the bytes of a safetensors file.

        Args:
            bitmaps: True to store a bitmap of the changed elements if it is smaller than the gaps,
                and no indices if all elements have values. TRL's reader supports only gaps.
        """
        tensors: dict[str, Tensor] = {}
        for patch in self.patches:
            tensors |= _encoded(patch, bitmaps or self.is_full, bitmaps)
        shapes = {patch.name: patch.shape for patch in self.patches}
        sparsity = 1.0 - self.changed / max(1, self.watched)
        metadata = {
            "format": _FORMAT,
            "version": "1",
            "sparse": str(not self.is_full),
            "model_version": str(self.number),
            "num_changed_params": str(len(self.patches)),
            "total_changed_elements": str(self.changed),
            "total_elements": str(self.watched),
            "sparsity": str(sparsity),
            "encoding": "gap_delta",
            "run": self.run,
            "part": str(self.part),
            "parts": str(self.parts),
            "shapes": json.dumps(shapes),
        }
        return safetensors_file(tensors, metadata)

    def save(self, path: str | os.PathLike[str], *, bitmaps: bool = True) -> int:
        """Write the delta to a file. The file is replaced atomically, so other processes never read
        an incomplete file.

        Args:
            path: the file.
            bitmaps: True to allow bitmaps in place of gaps, as in :meth:`to_bytes`.

        Returns:
            The size of the file in bytes.
        """
        target, content = Path(path), self.to_bytes(bitmaps=bitmaps)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        temporary.write_bytes(content)
        os.replace(temporary, target)
        return len(content)

    @classmethod
    def from_bytes(cls, content: bytes) -> WeightDelta:
        """Return the delta that the bytes of a file contain.

        Args:
            content: the bytes of the whole file.

        Raises:
            ValueError: the bytes are not a delta, or are incomplete.
        """
        metadata, tensors = _from_file(content)
        try:
            shapes = json.loads(metadata["shapes"])
            patches = [_decoded(name, tuple(shape), tensors) for name, shape in shapes.items()]
            return cls(
                metadata["run"],
                int(metadata["model_version"]),
                metadata["sparse"] == "False",
                int(metadata["part"]),
                int(metadata["parts"]),
                int(metadata["total_elements"]),
                tuple(patches),
            )
        except KeyError as error:
            raise ValueError(
                f"the file is not a delta of this package, because the entry {error} is missing; "
                "pass a file of WeightDelta.save()"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WeightDelta:
        """Return the delta that a file contains.

        Args:
            path: the file.

        Raises:
            ValueError: the file is not a delta, or is incomplete.
        """
        return cls.from_bytes(Path(path).read_bytes())


# -- a patch as tensors of a file -----------------------------------------------------------------


def _encoded(patch: WeightPatch, whole: bool, bitmaps: bool) -> dict[str, Tensor]:
    """Return one patch as host tensors, by key of the file.

    Args:
        patch: new values of one parameter.
        whole: True to store a patch with all values under the parameter's name.
        bitmaps: True to allow bitmaps.
    """
    values, count = patch.values.cpu(), patch.values.numel()
    if count == patch.numel and whole:
        return {patch.name: values.view(patch.shape)}
    indices = patch.positions().cpu()
    gaps = torch.diff(indices, prepend=torch.tensor([-1], device="cpu")) - 1
    width = 2 if count == 0 or int(gaps.max()) < _SHORT_GAP else 4
    if bitmaps and -(-patch.numel // 8) < width * count:
        # Element i is bit i % 8 of byte i // 8.
        flags = torch.zeros(-(-patch.numel // 8), 8, dtype=torch.uint8, device="cpu")
        flags.view(-1)[indices] = 1
        bits = torch.tensor(_PLACES, dtype=torch.uint8, device="cpu")
        places = {f"{patch.name}.bits": (flags * bits).sum(1, dtype=torch.uint8)}
    else:
        places = {f"{patch.name}.idx": gaps.to(torch.uint16 if width == 2 else torch.uint32)}
    return places | {f"{patch.name}.val": values}


def _decoded(name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> WeightPatch:
    """Return one patch from the tensors of a file.

    Args:
        name: FQN of the parameter.
        shape: shape of the parameter.
        tensors: the tensors by key of the file.

    Raises:
        ValueError: the tensors do not fit each other.
        KeyError: a tensor is missing.
    """
    numel = math.prod(shape)
    if name in tensors:
        values, indices, count, last = tensors[name].reshape(-1), None, numel, numel - 1
    else:
        values, bits = tensors[f"{name}.val"], tensors.get(f"{name}.bits")
        if bits is None:
            indices = (tensors[f"{name}.idx"].to(torch.int64) + 1).cumsum(0) - 1
        else:
            indices = bits_set(bits)
        count, last = indices.numel(), int(indices[-1]) if indices.numel() else -1
    if values.numel() != count or last >= numel:
        raise ValueError(
            f"{name}: the file is damaged, because it has {values.numel()} values for {count} "
            f"positions up to {last} in {numel} elements; publish the weights again"
        )
    return WeightPatch(name, shape, values.dtype, values, indices)


_PLACES = [1 << bit for bit in range(8)]


def bits_set(bits: Tensor) -> Tensor:
    """Return the indices of the set bits of a uint8 bitmap, ascending, int64."""
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=bits.device)
    if 4 * int(bits.count_nonzero()) > bits.numel():
        return (bits[:, None] & places).view(-1).nonzero().view(-1)
    (bytes_set,) = bits.nonzero(as_tuple=True)
    rows, columns = (bits[bytes_set, None] & places).nonzero(as_tuple=True)
    return bytes_set[rows] * 8 + columns


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor of 1, 2 or 4 bytes per element as integers of the same size."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def bits_differ(one: Tensor, other: Tensor) -> Tensor:
    """Return the flat indices at which two tensors of one shape and dtype differ in any bit."""
    differ = as_integers(one.reshape(-1)) != as_integers(other.reshape(-1))
    return differ.nonzero().view(-1)


# -- safetensors: header length, JSON header, tensor bytes ----------------------------------------


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return a copy of the bytes of a tensor, in row-major order."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def safetensors_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file.

    Args:
        tensors: tensors by key.
        metadata: strings by key, for the header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    # Store the widest dtype first, so that each tensor starts at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    place, pieces = 0, []
    for name, tensor in ordered:
        end = place + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        pieces.append(tensor_bytes(tensor))
        place = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return b"".join([len(encoded).to_bytes(8, "little"), encoded, *pieces])


def _from_file(content: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        metadata = header.pop("__metadata__")
        # Copy the data, because torch.frombuffer() warns of read-only memory. Offsets in the header
        # count from the start of the data.
        memory, tensors = bytearray(content[begin:]), {}
        for name, form in header.items():
            dtype, (start, end) = _BY_NAME[form["dtype"]], form["data_offsets"]
            count = math.prod(form["shape"])
            if not 0 <= start <= end <= len(memory) or end - start != count * dtype.itemsize:
                raise ValueError(
                    f"bytes [{start}, {end}) of {len(memory)} do not fit the dtype and shape of "
                    f"{name}"
                )
            if count:
                tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
            else:
                tensor = torch.empty(0, dtype=dtype, device="cpu")
            tensors[name] = tensor.view(form["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the file is not a delta, or is incomplete: {error!r}; publish the weights again"
        ) from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"the file is not a delta: its format is {metadata.get('format')!r}; pass a file with "
            f"the format {_FORMAT!r}"
        )
    return metadata, tensors
