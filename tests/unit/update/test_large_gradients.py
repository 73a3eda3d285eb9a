"""A finite gradient, however large, makes no NaN out of finite state."""

import pytest
import torch
from torch import nn

import mp_optim
from support.kernels import NEED_KERNELS

BACKENDS = ["reference", pytest.param("native", marks=NEED_KERNELS)]
RULES = ["AdamW", "StableAdamW", "LAMB", "SGD", "Lion"]
LARGE = [2e20, 1e21, 3e38]
"""The square overflows; the second moment too; as large as bfloat16 and FP32 have it."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_finite_gradient_makes_no_nan(backend, rule, large, dtype):
    """Neither in the step, nor in those after it, nor where it comes again."""
    param = nn.Parameter(torch.ones(8, 64, dtype=dtype))
    optimizer = getattr(mp_optim, rule)([("p", param)], lr=0.1, backend=backend)
    for row in (0, None, 1, 0):
        param.grad = torch.ones_like(param)
        if row is not None:
            param.grad[row, 0] = large
        optimizer.step()
        assert optimizer.last_step.success
        assert param.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_square_that_overflows_shortens_stable_adamws_step(backend):
    """As a square does that is as far beyond the second moment and does not overflow."""

    def lengths(large):
        param = nn.Parameter(torch.zeros(64))
        settings = {"lr": 0.1, "betas": (0.0, 0.99), "weight_decay": 0.0}
        optimizer = mp_optim.StableAdamW([param], backend=backend, **settings)
        for step in range(3):
            param.grad = torch.ones(64)
            if step == 2:
                before = param.detach().clone()
                param.grad[0] = large
            optimizer.step()
        return (param - before)[1:].abs().max().item()

    assert lengths(1.0) == pytest.approx(0.1, rel=1e-3)
    for large in LARGE:
        assert 0.02 < lengths(large) < 1.01 * lengths(1e18)
