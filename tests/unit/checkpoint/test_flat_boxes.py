"""A flat range of a tensor as few disjoint boxes that cover the range exactly."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_optim.core.flat_shard import FlatShard, boxes


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(0, numel - start))


@given(ranges())
@settings(deadline=None, max_examples=300)
def test_boxes_cover_a_flat_range_once_in_order(case):
    shape, start, count = case
    index = torch.arange(math.prod(shape)).view(shape)
    found = boxes(shape, start, count)
    covered = []
    for box in found:
        part = index
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        first = start + len(covered)
        assert part.reshape(-1).tolist() == list(range(first, first + box.numel))
        covered += part.reshape(-1).tolist()
    assert covered == list(range(start, start + count))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert bool(found) == bool(count or math.prod(shape) == 0)


@pytest.mark.parametrize(
    ("shape", "start", "count"), [((2, 3), -1, 2), ((2, 3), 5, 2), ((), 1, 1), ((2, 0), 0, 1)]
)
def test_flat_shard_refuses_a_range_outside_its_tensor(shape, start, count):
    with pytest.raises(ValueError, match="not inside a tensor of shape"):
        FlatShard(torch.zeros(count), shape, start)


def test_flat_shard_refuses_local_memory_that_is_not_flat():
    for local in (torch.zeros(2, 2), torch.zeros(4)[::2], torch.tensor(1.0)):
        with pytest.raises(ValueError, match="one contiguous dimension"):
            FlatShard(local, (4,), 0)
