"""Host memory for state: zeroed, aligned, and without overlaps."""

import mmap

import pytest
import torch

from mp_optim.host.host_memory import ALIGNMENT, HUGE_FROM, zeros_host


@pytest.mark.parametrize("size", [0, 1, HUGE_FROM - 1, HUGE_FROM, 2 * HUGE_FROM + 3])
def test_zeros_host_returns_writable_zeros_of_each_size(size):
    memory = zeros_host(size)
    assert memory.shape == (size,) and memory.dtype == torch.uint8 and not memory.any()
    assert memory.fill_(7).sum() == 7 * size


def test_zeros_host_allocations_are_aligned_and_do_not_overlap():
    blocks = [zeros_host(HUGE_FROM).fill_(value) for value in range(5)]
    for value, block in enumerate(blocks):
        assert (block == value).all() and block.data_ptr() % ALIGNMENT == 0
    offsets = {block.data_ptr() % (2 << 20) for block in blocks}
    assert len(offsets) == 5 or not hasattr(mmap, "MADV_HUGEPAGE"), (
        "streams would meet in the same cache sets"
    )


def test_zeros_host_returns_zeros_when_huge_pages_are_missing(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not zeros_host(HUGE_FROM).any()
    monkeypatch.undo()

    class Refuses(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("no")

    monkeypatch.setattr(mmap, "mmap", Refuses)
    assert not zeros_host(HUGE_FROM).any()
