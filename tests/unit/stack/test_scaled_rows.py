"""``scale_rows_`` multiplies rows between steps, as QK-clip needs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mp_optim


class Attention(nn.Module):
    def __init__(self, heads=4, width=32):
        super().__init__()
        self.heads = heads
        self.query, self.key = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.largest = torch.zeros(heads)

    def forward(self, x):
        q, k = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for each in (self.query, self.key)
        )
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        self.largest = logits.detach().float().amax((0, 2, 3))
        return F.softmax(logits, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_clip_by_scale_rows_keeps_logits_below_the_limit(dtype):
    torch.manual_seed(0)
    model = Attention().to(dtype)
    optimizer = mp_optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    x = 8 * torch.randn(2, 16, 32).to(dtype)
    limit, rows = 5.0, 32 // model.heads
    model(x)[..., 0].sum().backward()
    optimizer.step()
    model(x)
    before = model.largest.clone()
    assert before.max() > 2 * limit
    factors = (limit / before).clamp(max=1.0).sqrt().repeat_interleave(rows)
    names = [optimizer.stack.slot_name(slot) for slot in optimizer.stack.slots()]
    optimizer.scale_rows_(dict.fromkeys(names, factors))
    model(x)
    # Each logit is a sum of products of rounded values, before and after the clip.
    assert model.largest.max() <= limit * (1 + 8 * torch.finfo(dtype).eps)
    is_below = before <= limit
    assert torch.equal(model.largest[is_below], before[is_below])
