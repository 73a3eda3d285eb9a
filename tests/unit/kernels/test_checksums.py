"""Checksums of the compiled kernel equal checksums of torch operations."""

import pytest
import torch

from mp_optim.kernels import checksums as measures
from mp_optim.kernels.native_library import NativeLibrary, set_host_threads
from support.kernels import needs_kernels

SIZES = [0, 1, 2, 1023, 1024, 1025, 70_001, 200_000, (1 << 20) + 5]


def any_bits(size: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(size)
    bits = torch.randint(-(1 << 15), 1 << 15, (size,), generator=noise)
    return bits.short().view(torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 3])
def test_checksums_of_native_kernel_equal_torch_operations(monkeypatch, threads):
    tensors = [any_bits(size) for size in SIZES]
    matrix = any_bits(3 * 2000).view(3, 2000)
    tensors += [matrix, matrix.mT, matrix.half()]
    set_host_threads(threads)
    by_kernel = measures.checksums_of(tensors)
    set_host_threads(None)
    monkeypatch.setattr(measures, "native_library", lambda: NativeLibrary(None, "left out"))
    assert by_kernel == measures.checksums_of(tensors)


@pytest.mark.parametrize("bit", [0, 7, 15])
@pytest.mark.parametrize("at", [0, 1023, 1024, 4999])
def test_checksum_changes_when_any_bit_flips(bit, at):
    tensor = any_bits(5000)
    before = measures.checksums_of([tensor])
    tensor.view(torch.int16)[at] ^= torch.tensor(
        1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16
    )
    assert measures.checksums_of([tensor]) != before
