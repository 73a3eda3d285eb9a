"""Steps without gradients, and steps that are skipped again and again, are reported."""

import copy
import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mp_optim import OptimizerConfig, get_megatron_optimizer
from support.launch import results_of_ranks
from support.models import build, config_for, tokens_of
from support.offload import finish_backward_work


def regression(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, 8, generator=generator).to(next(model.parameters()).dtype)
    return (model(inputs).float() - 1.0).square().mean()


def fp16(**settings: Any) -> tuple[nn.Module, Any]:
    model = regression(torch.float16)
    return model, get_megatron_optimizer(OptimizerConfig(lr=1e-2, fp16=True, **settings), model)


def warned(work: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_step_warns_once_when_another_copy_of_the_model_is_trained(precision):
    model, stack = build(precision)
    trained = copy.deepcopy(model)

    def work() -> None:
        for step in range(3):
            stack.scale_loss(trained(tokens_of(step))).backward()
            stack.step()

    count = sum(len(group["params"]) for group in stack.param_groups)
    messages = warned(work)
    assert len(messages) == 1
    assert f"none of the optimizer's {count} parameters has a gradient" in messages[0]


def test_step_names_adapters_added_after_the_optimizer_was_built():
    import peft

    model = regression(torch.float32)
    stack = get_megatron_optimizer(OptimizerConfig(lr=1e-2), model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    loss_of(adapted).backward()
    (message,) = warned(stack.step)
    assert "4 trainable parameters that the optimizer does not know" in message
    assert "lora_A" in message
    fresh = get_megatron_optimizer(OptimizerConfig(lr=1e-2), adapted)
    assert warned(fresh.step) == [] and fresh.metrics()["grad_norm"] > 0


def test_step_does_not_warn_when_experts_have_no_gradients():
    model, stack = build("bf16")
    for name, param in model.named_parameters():
        param.grad = None if "experts" in name else torch.ones_like(param)
    assert warned(stack.step) == []


def skipped(stack: Any, model: nn.Module, steps: int, look: bool = False) -> list[str]:
    def work() -> None:
        for seed in range(steps):
            stack.zero_grad()
            stack.scale_loss(loss_of(model, seed)).backward()
            model[2].weight.grad[0, 0] = math.nan
            result = stack.step()
            assert not look or not result.success
        stack.metrics()

    return warned(work)


@pytest.mark.parametrize(
    "dtype, settings, count",
    [
        (torch.bfloat16, {"bf16": True}, 3),
        (torch.float32, {}, 3),
        (torch.float16, {"fp16": True, "loss_scale": 8.0}, 3),
        (torch.float16, {"fp16": True, "initial_loss_scale": 4.0, "min_loss_scale": 4.0}, 3),
        (torch.float16, {"fp16": True}, 1),  # 33 skips bring the dynamic scale to its minimum of 1
    ],
)
def test_step_warns_at_1st_10th_and_100th_consecutive_skip_with_parameter_name(
    dtype, settings, count
):
    model = regression(dtype)
    stack = get_megatron_optimizer(OptimizerConfig(lr=1e-2, **settings), model)
    messages = skipped(stack, model, 105)
    assert len(messages) == count
    assert all("the gradient of 2.weight holds an inf or nan" in text for text in messages)
    assert "100 steps in a row" in messages[-1]


@pytest.mark.parametrize("clip_grad", [1.0, 0.0])
def test_step_warns_again_when_a_good_step_ended_consecutive_skips(clip_grad):
    model, stack = fp16(clip_grad=clip_grad)
    assert skipped(stack, model, 9) == []
    model = regression()
    config = OptimizerConfig(lr=1e-2, bf16=True, clip_grad=clip_grad)
    stack = get_megatron_optimizer(config, model)
    for _ in range(3):
        assert len(skipped(stack, model, 5)) == 1
        stack.zero_grad()
        loss_of(model).backward()
        assert warned(stack.step) == []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return results_of_ranks("standstill", 2, tmp_path_factory.mktemp("skips"))


def test_skip_warning_names_the_gradient_only_on_the_rank_of_its_pipeline_stage(ranks):
    for rank, found in enumerate(ranks):
        assert found["stub"] is True
        culprit = "the gradient of stage1 holds" if rank == 1 else "on another rank"
        assert len(found["said"]) == 1 and culprit in found["said"][0]


def test_skipped_step_is_logged_as_warning_only_on_rank_0(ranks):
    first, second = (rank["logged"] for rank in ranks)
    assert [level for level, _ in first] == ["WARNING"]
    assert [level for level, _ in second] == ["INFO"] and first[0][1] == second[0][1]


@pytest.mark.parametrize("mode", ["overlap", "speculative"])
def test_step_warns_once_when_torch_clips_gradients_already_used_during_backward(mode):
    model = regression()
    stack = get_megatron_optimizer(config_for("bf16", 1.0, offload_mode=mode), model)

    def work(limit: float | None) -> None:
        for seed in range(4):
            stack.zero_grad()
            # Accumulating a second micro-batch needs no warning.
            for part in (2 * seed, 2 * seed + 1):
                (loss_of(model, part) / 2).backward()
            finish_backward_work(stack)
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            stack.step()

    for harmless in (None, math.inf):
        assert warned(partial(work, harmless)) == []
        assert stack.metrics()["stale_buckets"] == 0
    (message,) = warned(lambda: work(1e-3))
    assert "clip_grad_norm_" in message and stack.metrics()["stale_buckets"] >= 4


def test_step_warning_points_to_the_file_of_the_caller():
    model = nn.Linear(4, 4)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), model)
    with pytest.warns(UserWarning, match="has a gradient") as caught:
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]
