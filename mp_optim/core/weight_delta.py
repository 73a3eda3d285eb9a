"""Weight deltas: the elements of a model's weights that changed since the last publication, as
data and as bytes. :mod:`mp_optim.apps.deltas` applies them in another process.

The bytes are a safetensors file with the keys and metadata that TRL's sparse patches have
(huggingface/trl#5937): ``<name>.idx`` with the gaps between ascending indices, ``<name>.val`` with
the values; a parameter that is given whole has its name. What TRL has no word for is said in
further metadata, and by ``<name>.bits`` where a bitmap is smaller than gaps.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping
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
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_SHORT_GAP = 1 << 16
_INTEGERS = {2: torch.int16, 4: torch.int32}


class WeightPatch(NamedTuple):
    """New values of one parameter, as vLLM's ``CheckpointWeightPatch`` has them: its fields in its
    order.

    Attributes:
        name, shape, dtype: of the whole parameter.
        values: 1-D.
        indices: of each value, in the row-major flattened parameter: int64, ascending; None if
            these are all of its elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class WeightDelta:
    """What a rank publishes: the new values of its part of the weights.

    Attributes:
        run: who publishes: a trainer from ``track_changes()`` on.
        number: of the publication, from 1 on.
        is_full: all values of the part, whatever was published before.
        part, parts: which part of the model it is, of how many.
        watched: elements that are watched, changed or not.
        patches: of the parameters that have some. The tensors are copies.
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
        """How many values there are."""
        return sum(patch.values.numel() for patch in self.patches)

    def to_bytes(self, *, bitmaps: bool = True) -> bytes:
        """The delta as a safetensors file.

        Args:
            bitmaps: say by a bitmap which elements have values, where that is smaller than gaps;
                and nothing where all have. TRL's reader knows gaps alone.
        """
        tensors: dict[str, Tensor] = {}
        for patch in self.patches:
            tensors |= _encoded(patch, bitmaps or self.is_full, bitmaps)
        return _as_file(tensors, self._metadata())

    def save(self, path: str | os.PathLike[str], *, bitmaps: bool = True) -> int:
        """Write the file; who looks for it finds all of it or nothing. Returns its bytes."""
        target, content = Path(path), self.to_bytes(bitmaps=bitmaps)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        beside.write_bytes(content)
        os.replace(beside, target)
        return len(content)

    def _metadata(self) -> dict[str, str]:
        shapes = {patch.name: patch.shape for patch in self.patches}
        sparsity = 1.0 - self.changed / max(1, self.watched)
        return {
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

    @classmethod
    def from_bytes(cls, content: bytes) -> WeightDelta:
        """The delta in a file's bytes.

        Raises:
            ValueError: they are no delta, or not all of one.
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
            raise ValueError(f"no delta of this package: the file has no {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WeightDelta:
        """The delta in a file; see :meth:`from_bytes`."""
        return cls.from_bytes(Path(path).read_bytes())


# -- one parameter as tensors of a file -----------------------------------------------------------


def _encoded(patch: WeightPatch, whole: bool, bitmaps: bool) -> dict[str, Tensor]:
    """One patch by the keys of the file, on the host.

    Args:
        whole: one that has all elements may be the parameter itself. bitmaps: may be used.
    """
    values, count = patch.values.cpu(), patch.values.numel()
    if count == patch.numel and whole:
        return {patch.name: values.view(patch.shape)}
    indices = patch.indices
    if indices is None:
        indices = torch.arange(count, device="cpu")
    indices = indices.cpu()
    gaps = torch.diff(indices, prepend=torch.tensor([-1], device="cpu")) - 1
    width = 2 if count == 0 or int(gaps.max()) < _SHORT_GAP else 4
    if bitmaps and -(-patch.numel // 8) < width * count:
        which = {f"{patch.name}.bits": packed_bits(indices, patch.numel)}
    else:
        which = {f"{patch.name}.idx": gaps.to(torch.uint16 if width == 2 else torch.uint32)}
    return which | {f"{patch.name}.val": values}


def _decoded(name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> WeightPatch:
    """One patch from the tensors of a file.

    Raises:
        ValueError: they do not fit each other.
        KeyError: one is missing.
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
            f"{name}: {values.numel()} values for {count} elements up to {last}, of {numel}: the "
            "file is damaged"
        )
    return WeightPatch(name, shape, values.dtype, values, indices)


_PLACES = [1 << bit for bit in range(8)]


def packed_bits(indices: Tensor, numel: int) -> Tensor:
    """A bitmap of so many bits in which those at ``indices`` are set: uint8, element i is bit i % 8
    of byte i // 8."""
    flags = torch.zeros(-(-numel // 8) * 8, dtype=torch.uint8, device=indices.device)
    flags[indices] = 1
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=indices.device)
    return (flags.view(-1, 8) * places).sum(1, dtype=torch.uint8)


def bits_set(bits: Tensor) -> Tensor:
    """Indices of the bits that are set, ascending, int64."""
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=bits.device)
    if 4 * int(bits.count_nonzero()) > bits.numel():
        return (bits[:, None] & places).view(-1).nonzero().view(-1)
    (bytes_set,) = bits.nonzero(as_tuple=True)
    rows, columns = (bits[bytes_set, None] & places).nonzero(as_tuple=True)
    return bytes_set[rows] * 8 + columns


def bits_differ(one: Tensor, other: Tensor) -> Tensor:
    """Flat indices at which two tensors of one shape and dtype differ, in any bit."""
    integers = _INTEGERS[one.element_size()]
    same = one.reshape(-1).view(integers) != other.reshape(-1).view(integers)
    return same.nonzero().view(-1)


# -- safetensors: a length, JSON, and the bytes of the tensors ------------------------------------


def _as_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    # The widest first: each tensor lies at a multiple of its elements' size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    place, pieces = 0, []
    for name, tensor in ordered:
        end = place + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        steady = tensor.contiguous()
        pieces.append(ctypes.string_at(steady.data_ptr(), steady.nbytes) if steady.nbytes else b"")
        place = end
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    return b"".join([len(said).to_bytes(8, "little"), said, *pieces])


def _from_file(content: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        metadata = header.pop("__metadata__")
        tensors = dict(_tensors_in(header, content, begin))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no delta, or not all of one: {error!r}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"no delta: format {metadata.get('format')!r} instead of {_FORMAT!r}")
    return metadata, tensors


def _tensors_in(
    header: Mapping[str, Any], content: bytes, begin: int
) -> Iterator[tuple[str, Tensor]]:
    memory = bytearray(content[begin:])  # tensors are writable, and aligned as the file is
    for name, form in header.items():
        dtype, (start, end) = _BY_NAME[form["dtype"]], form["data_offsets"]
        count = math.prod(form["shape"])
        if not 0 <= start <= end <= len(memory) or end - start != count * dtype.itemsize:
            raise ValueError(f"{name}: bytes [{start}, {end}) of {len(memory)}")
        if count:
            tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        else:
            tensor = torch.empty(0, dtype=dtype, device="cpu")
        yield name, tensor.view(form["shape"])
