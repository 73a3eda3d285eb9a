"""A tensor in a file: raw elements behind a header with which ``torch.load`` reads them, too.

The header is that of ``torch.save(..., _use_new_zipfile_serialization=False)``, whose elements come
last and raw. It depends on the dtype and the shape alone, so it is made once for all tensors that
share them: writing a small tensor is two copies, where ``torch.save`` takes hundreds of
microseconds.
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
import struct
from collections import OrderedDict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v3
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

_PICKLE_PROTOCOL = 2  # what torch.load's safe unpickler knows
_KEY = "0"


class _Storage:
    """Stands in for a storage of bytes while a header is pickled."""


class _Rebuilt:
    """Pickles as what makes a contiguous tensor from a storage."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        sizes = [max(size, 1) for size in shape]
        strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(shape))]
        hooks: OrderedDict[str, Any] = OrderedDict()
        self._arguments = (
            _Storage(),
            0,
            tuple(shape),
            tuple(strides),
            False,
            hooks,
            dtype,
        )

    def __reduce__(self) -> Any:
        return _rebuild_tensor_v3, self._arguments


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, count: int) -> None:
        super().__init__(file, protocol=_PICKLE_PROTOCOL)
        self._count = count

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return "storage", torch.ByteStorage, _KEY, "cpu", self._count, None
        return None


@lru_cache(maxsize=4096)
def header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What comes before the elements of a contiguous tensor."""
    count = math.prod(shape) * dtype.itemsize
    buffer = io.BytesIO()
    for part in (
        MAGIC_NUMBER,
        PROTOCOL_VERSION,
        {"protocol_version": PROTOCOL_VERSION, "little_endian": True},
    ):
        pickle.dump(part, buffer, protocol=_PICKLE_PROTOCOL)
    _Pickler(buffer, count).dump(_Rebuilt(dtype, shape))
    pickle.dump([_KEY], buffer, protocol=_PICKLE_PROTOCOL)
    return buffer.getvalue() + struct.pack("<q", count)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, writable; the tensor has to outlive the
    view."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview(
        (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    ).cast("B")
