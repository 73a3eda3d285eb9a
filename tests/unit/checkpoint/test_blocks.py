"""Parts of tensors that are stored in blocks: each element keeps the scale of its block in the
whole tensor."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_optim.checkpoint.checked_load import as_read
from mp_optim.checkpoint.entries import STATE
from mp_optim.config.state_forms import BLOCK
from mp_optim.core.flat_shard import FlatShard, is_cut, scales_of_elements

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(shapes, st.data())
def test_a_flat_part_has_the_scales_of_its_elements(shape, data):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    codes = (torch.arange(count) % 127).to(torch.int8)
    scales = 1.0 + torch.arange(-(-count // BLOCK)).float()
    whole = codes.float() * scales.repeat_interleave(BLOCK)[:count]
    part = FlatShard(codes[start:stop].clone(), shape, start)
    assert is_cut(part) == (stop - start < count)
    found = scales_of_elements(part, scales)
    assert found.shape == (stop - start, 1) and found.dtype == torch.float32
    assert torch.equal(part.local.float() * found[:, 0], whole[start:stop])


@pytest.mark.parametrize("cut", [False, True])
def test_scales_are_cut_with_what_they_belong_to_and_only_then(cut):
    part = FlatShard(torch.ones(300 if cut else 600, dtype=torch.int8), (600,), 300 if cut else 0)
    scales, step = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4.0)
    name = f"{STATE}exp_avg.w"
    tensors = {
        name: part,
        f"{STATE}exp_avg_scale.w": scales,
        f"{STATE}step.w": step,
        "model.w": part,
    }
    found = as_read(tensors)
    assert (
        found.keys() == tensors.keys() and found[name] is part and found[f"{STATE}step.w"] is step
    )
    if cut:
        assert found[f"{STATE}exp_avg_scale.w"].flatten().tolist() == [2.0] * 212 + [3.0] * 88
    else:
        assert found[f"{STATE}exp_avg_scale.w"] is scales
