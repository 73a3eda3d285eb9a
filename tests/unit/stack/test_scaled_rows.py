"""scale_rows_: rows multiplied between steps, in FP32, wherever a parameter is kept; and QK-clip as
a program would do it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mp_optim
from support.models import build, same_bits, tokens_of, train

ROWS = 8
"""Of the matrix ``dense``."""
PLACES = {
    "device": {},
    "host": {"fraction": 1.0},
    "speculative": {"fraction": 1.0, "offload_mode": "speculative"},
    "streamed": {"fraction": 1.0, "offload_place": "streamed", "stream_window_bytes": 4096},
}


def factors_of(model):
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.rand(param.shape[0], generator=generator)
        for name, param in model.named_parameters()
        if param.dim()
    }


def mains(optimizer):
    return {name: main.clone() for name, main in optimizer.named_main_params()}


@pytest.mark.parametrize("place", [*PLACES, "disk"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-remainder", "fp16", "fp32"])
def test_main_params_are_scaled_in_fp32_and_the_model_follows(precision, place, tmp_path):
    on_disk = {"fraction": 1.0, "optimizer_state_path": str(tmp_path)}

    def run(**fields):
        model, optimizer = build(precision, clip_grad=0.0, **fields)
        train(model, optimizer, 3)
        before = mains(optimizer)
        factors = factors_of(model)
        optimizer.scale_rows_(factors)
        for name, main in optimizer.named_main_params():
            rows = factors[name].view(-1, *[1] * (main.dim() - 1))
            assert same_bits(main.detach(), before[name] * rows)
            param = model.get_parameter(name)
            assert same_bits(param.detach(), main.detach().to(param.dtype))
        return train(model, optimizer, 2, start=3), mains(optimizer)

    (losses, found), (expected_losses, expected) = (run(**PLACES.get(place, on_disk)), run())
    assert losses == expected_losses
    assert all(same_bits(found[name], expected[name]) for name in expected)


def test_what_was_stepped_early_is_stepped_again():
    """Between backward and step."""

    def run(**fields):
        model, optimizer = build("bf16", clip_grad=0.0, **fields)
        train(model, optimizer, 3)
        optimizer.scale_loss(model(tokens_of(3))).backward()
        optimizer.scale_rows_(factors_of(model))
        optimizer.step()
        return mains(optimizer)

    found, expected = run(**PLACES["speculative"]), run()
    assert all(same_bits(found[name], expected[name]) for name in expected)


class Attention(nn.Module):
    """Heads whose largest logit is known after each forward."""

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
def test_qk_clip_keeps_logits_below_a_limit(dtype):
    """Each head's query and key rows are scaled by the root of what its largest logit is above the
    limit: the logits, which are products of the two, come down to it."""
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
    # Each logit is a sum of products of rounded values, and so are those before.
    assert model.largest.max() <= limit * (1 + 8 * torch.finfo(dtype).eps)
    is_below = before <= limit
    assert torch.equal(model.largest[is_below], before[is_below])


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ({"nothing": torch.ones(3)}, "nothing is no parameter that is trained here"),
        ({"dense": torch.ones(3)}, r"factors of dense are torch.float32 of shape \(3,\)"),
        ({"dense": torch.ones(2, 2)}, "one floating-point factor is needed for each of"),
        ({"dense": [1.0, 2.0]}, "factors of dense are a list, not a tensor"),
        ({"dense": torch.ones(ROWS, device="meta")}, "on meta; a plain dense tensor"),
        ({"dense": torch.ones(ROWS).to_sparse()}, "layout torch.sparse_coo"),
        (
            {"dense": torch.full((ROWS,), math.nan)},
            "row 0 of dense is nan, which is not finite in FP32",
        ),
        (
            {"dense": torch.tensor([1.0] * (ROWS - 1) + [1e300], dtype=torch.float64)},
            f"row {ROWS - 1} of dense is 1e\\+300",
        ),
    ],
)
def test_what_cannot_be_scaled_changes_nothing(factors, said):
    model, optimizer = build("bf16")
    train(model, optimizer, 1)
    before = mains(optimizer)
    first = next(iter(factors_of(model).items()))
    with pytest.raises(ValueError, match=said):
        optimizer.scale_rows_(dict([first]) | factors)
    assert all(same_bits(before[name], main) for name, main in mains(optimizer).items())
