"""Checks of precision: bfloat16, float16, loss scales, autocast and default dtypes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mp_optim.apps.conform.kit import (
    Make,
    NotApplicable,
    filled,
    layers,
    make_or_refuse,
    must,
    noise,
    percent,
    require,
    require_same,
    saved,
    should,
    tensors_in,
    train,
    trained,
    weights,
)


def way(
    make: Make, dtype: torch.dtype, start: float, sizes: list[float], **settings: float
) -> Tensor:
    """Return the change of a weight, in float64, after one step for each gradient in ``sizes``."""
    param = nn.Parameter(filled(start, 16, 16, dtype=dtype))
    optimizer = make_or_refuse(make, [param], **settings)
    for size in sizes:
        param.grad = filled(size, 16, 16, dtype=dtype)
        optimizer.step()
    return param.detach().double() - start


@should()
def bfloat16_weights_move_at_1e_6(make: Make) -> None:
    """64 steps of 1e-6 move a bfloat16 weight of 0.001, although each step is smaller than half
    a unit in the last place."""
    start = float(filled(0.001, dtype=torch.bfloat16))
    sizes = [1.0] * 64
    expected = way(make, torch.float32, start, sizes, lr=1e-6)
    if abs(float(expected.mean())) < 3e-5:
        raise NotApplicable("the optimizer scales steps by the size of weights, not by lr")
    found = way(make, torch.bfloat16, start, sizes, lr=1e-6)
    share = float(found.mean() / expected.mean())
    require(0.5 < share < 1.5, f"the weight moved by {percent(share)} of its float32 step")


@should()
def bfloat16_keeps_its_second_moment(make: Make) -> None:
    """The state of bfloat16 parameters follows gradients that become smaller: the weights' change
    differs from float32's by less than a quarter."""
    sizes = [1.0] * 20 + [0.05] * 300
    expected = way(make, torch.float32, 1.0, sizes, lr=0.01)
    found = way(make, torch.bfloat16, 1.0, sizes, lr=0.01)
    share = float(found.mean() / expected.mean())
    require(0.75 < share < 1.25, f"the weight moved by {percent(share)} of its float32 step")


@should()
def float16_steps_are_finite(make: Make) -> None:
    """Small float16 gradients (1e-5, whose squares underflow) cause finite steps, at most about
    twice as large as float32's."""
    expected = way(make, torch.float32, 1.0, [1e-5] * 2, lr=0.01).abs().max()
    found = way(make, torch.float16, 1.0, [1e-5] * 2, lr=0.01)
    require(found.isfinite().all(), "float16 weights are not finite after two steps")
    off = float(found.abs().max())
    require(
        off <= 2 * float(expected) + 0.002,
        f"weights moved by {off:.3g}, with float32 by {float(expected):.3g}",
    )


@must()
def a_step_without_numbers_is_skipped(make: Make) -> None:
    """With a GradScaler, a step with an inf in a gradient changes no weight and no state, and the
    loss scale decreases."""
    model, optimizer = trained(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    train(model, optimizer, 2)
    before = weights(model)
    state = tensors_in(saved(optimizer)["state"])
    for param in model.parameters():
        param.grad = filled(float("inf"), *param.shape)
    scaler.scale(filled(1.0))
    scaler.step(optimizer)
    scaler.update()
    require_same(weights(model), before, "weights after a step that overflowed")
    require_same(
        tensors_in(optimizer.state_dict()["state"]), state, "state after a step that overflowed"
    )
    require(scaler.get_scale() == 128.0, "the loss scale did not decrease")


@should()
def autocast_does_not_reach_a_step(make: Make) -> None:
    """A step inside autocast gives the same bits as a step outside."""
    results = []
    for enabled in (False, True):
        param = nn.Parameter(noise(24, 16))
        optimizer = make([param])
        for step in range(3):
            param.grad = noise(24, 16, seed=step + 1)
            torch.manual_seed(step)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                optimizer.step()
        results.append(param.detach())
    require_same(results[1:], results[:1], "inside autocast")


@should()
def a_default_dtype_does_not_reach_a_step(make: Make) -> None:
    """torch.set_default_dtype(float64), or bfloat16 while a model is built, changes no number."""
    expected = layers()
    train(expected, make(expected.parameters()), 3)
    for dtype in (torch.float64, torch.bfloat16):
        model = layers()
        standard = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            train(model, make(model.parameters()), 3)
        finally:
            torch.set_default_dtype(standard)
        require_same(weights(model), weights(expected), f"with {dtype} as the default dtype")
