"""Edge cases of a step: a norm at the threshold, two limits on one norm, and late writes to
parameters and learning rates."""

import math

import pytest
import torch
from torch import nn

from mp_optim import get_megatron_optimizer
from support.models import config_for

each_backend = pytest.mark.parametrize(
    "backend",
    [
        "auto",
        pytest.param(
            "triton",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="Triton's interpreter runs on the CPU"
            ),
        ),
    ],
)


def one_param(precision, values, **settings):
    config = config_for(precision, **settings)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(len(values), dtype=dtype))})
    optimizer = get_megatron_optimizer(config, model)
    model["w"].grad = torch.tensor(values, dtype=dtype) * optimizer.get_loss_scale().to(dtype)
    return model, optimizer


@each_backend
def test_step_is_skipped_only_when_norm_is_above_the_threshold(backend):
    for threshold, is_stepped in ((5.0, True), (math.nextafter(5.0, 0.0), False)):
        model, optimizer = one_param(
            "fp32", [3.0, 4.0], grad_norm_skip_threshold=threshold, fused_backend=backend
        )
        result = optimizer.step()
        assert (result.success, result.grad_norm) == (is_stepped, 5.0)
        assert bool((model["w"] != 1.0).all()) == is_stepped


@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 2.0, 100.0])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1.0, 100.0])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_lamb_clips_to_the_smaller_of_clip_grad_and_max_grad_norm(
    clip_grad, max_grad_norm, fraction
):
    """LAMB applies ``max_grad_norm`` to gradients that ``clip_grad`` has clipped already."""
    config = config_for("fp32", fraction, optimizer="lamb", clip_grad=clip_grad)
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2))})
    optimizer = get_megatron_optimizer(config, model)
    for group in optimizer.param_groups:
        group["max_grad_norm"] = max_grad_norm
    model["w"].grad = torch.tensor([3.0, 4.0])
    assert optimizer.step().grad_norm == 5.0
    limit = min([5.0, *(limit for limit in (clip_grad, max_grad_norm) if limit)])
    first_moment = optimizer.state[model["w"]]["exp_avg"] / (
        1.0 - optimizer.param_groups[0]["betas"][0]
    )
    assert float(first_moment.norm()) == pytest.approx(limit, rel=1e-5)


@pytest.mark.parametrize("form", ["bf16-remainder", "bf16-8bit8"])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_main_param_rounds_to_any_bf16_value_written_to_the_parameter(form, fraction):
    patterns = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
        .repeat(4)
    )
    model = nn.ParameterDict(
        {
            "w": nn.Parameter(torch.ones(len(patterns), dtype=torch.bfloat16)),
            "other": nn.Parameter(torch.ones(1, dtype=torch.bfloat16)),
        }
    )
    optimizer = get_megatron_optimizer(config_for(form, fraction, lr=0.3, clip_grad=0.0), model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        model["w"].grad = torch.randn(len(patterns), generator=generator).bfloat16()
        optimizer.step()
    with torch.no_grad():
        model["w"].copy_(patterns)
    model["w"].grad, model["other"].grad = None, torch.ones(1, dtype=torch.bfloat16)
    optimizer.step()  # "w" has no gradient: the step follows its new values and steps "other".
    assert torch.equal(model["w"].view(torch.int16), patterns.view(torch.int16))
    main = dict(optimizer.named_main_params())["w"]
    assert torch.equal(main.isnan(), patterns.isnan())
    assert torch.equal(main.bfloat16()[patterns.isinf()], patterns[patterns.isinf()])
    finite = patterns.isfinite()
    distance = (main - patterns.float())[finite].abs()
    unit = patterns[finite].float().abs() * 2.0**-8 + 2.0**-134
    assert bool((distance <= unit).all())
