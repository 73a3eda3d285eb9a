"""Memory that is stepped through: zeroed, aligned, each tensor its own."""

from __future__ import annotations

import itertools
import mmap

import pytest
import torch

from mp_optim.host.host_memory import (
    ALIGNMENT,
    HUGE_FROM,
    Block,
    aligned_bytes,
    beside,
    zeros,
    zeros_host,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [0, 1, HUGE_FROM - 1, HUGE_FROM, 2 * HUGE_FROM + 3])
def test_memory_is_zeroed_and_writable(size: int) -> None:
    memory = zeros_host(size)
    assert memory.shape == (size,) and memory.dtype == torch.uint8 and not memory.any()
    assert memory.fill_(7).sum() == 7 * size


def test_allocations_do_not_overlap_and_are_aligned() -> None:
    blocks = [zeros_host(HUGE_FROM).fill_(value) for value in range(5)]
    for value, block in enumerate(blocks):
        assert (block == value).all() and block.data_ptr() % ALIGNMENT == 0
    offsets = {block.data_ptr() % (2 << 20) for block in blocks}
    assert len(offsets) == 5 or not hasattr(mmap, "MADV_HUGEPAGE"), (
        "streams would meet in the same cache sets"
    )


def test_a_system_without_huge_pages_gets_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not zeros_host(HUGE_FROM).any()
    monkeypatch.undo()

    class Refuses(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("no")

    monkeypatch.setattr(mmap, "mmap", Refuses)
    assert not zeros_host(HUGE_FROM).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tensors_of_any_dtype(dtype: torch.dtype) -> None:
    for shape in (torch.Size([]), torch.Size([0, 3]), torch.Size([3, 5]), torch.Size([HUGE_FROM])):
        tensor = zeros(shape, dtype, CPU)
        assert (
            tensor.shape == shape
            and tensor.dtype == dtype
            and tensor.is_contiguous()
            and not tensor.any()
        )


def test_a_block_hands_out_each_byte_once() -> None:
    forms = [
        (torch.Size([3]), torch.float32),
        (torch.Size([5, 2]), torch.bfloat16),
        (torch.Size([]), torch.uint8),
    ]
    block = Block(sum(aligned_bytes(shape.numel(), dtype) for shape, dtype in forms))
    tensors = [block.take(*form) for form in forms]
    for value, tensor in enumerate(tensors, 1):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [2], [3]]
    version = tensors[0]._version
    tensors[1].add_(1)
    assert tensors[0]._version == version, "a write to one would look like a write to all"
    with pytest.raises(ValueError, match="64 bytes asked for, 0 left"):
        block.take(torch.Size([1]), torch.float32)


def test_only_what_is_large_together_lies_together() -> None:
    small = [(torch.Size([8]), torch.float32)] * 3
    assert beside(small) is None and beside([(torch.Size([HUGE_FROM]), torch.float32)]) is None
    tensors = beside([(torch.Size([HUGE_FROM // 8]), torch.float32)] * 3)
    assert tensors is not None
    assert {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(tensors)} == {HUGE_FROM // 2}
