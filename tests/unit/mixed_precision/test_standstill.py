"""Training that stands still says so: gradients that were not scaled, that are not there, that are
never finite."""

import copy
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mp_optim import OptimizerConfig, get_megatron_optimizer
from support.launch import run_ranks
from support.models import build, tokens_of
from support.offload import finish_early_work

NOT_SCALED = "were not scaled.*scale_loss"


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


# -- FP16: the gradients are those of the scaled loss ---------------------------------------------

WAYS = {
    "scale_loss": lambda stack, loss: stack.scale_loss(loss),
    "get_loss_scale": lambda stack, loss: loss * stack.get_loss_scale(),
    "grad_scaler": lambda stack, loss: loss * stack.grad_scaler.scale,
    "the scaler's number": lambda stack, loss: loss * float(stack.grad_scaler.scale),
    "a part's": lambda stack, loss: stack.chained_optimizers[-1].scale_loss(loss),
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_whoever_asks_for_the_scale_is_believed(way: str) -> None:
    model, stack = build("fp16")
    for step in range(3):
        stack.zero_grad()
        for micro in range(2):
            WAYS[way](stack, model(tokens_of(2 * step + micro)) / 2).sum().backward()
        assert stack.step().success


def test_the_live_scale_may_be_kept() -> None:
    model, stack = fp16(initial_loss_scale=2.0**10)
    scale = stack.grad_scaler.scale
    for seed in range(3):
        stack.zero_grad()
        (loss_of(model, seed) * scale).sum().backward()
        assert stack.step().success


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_scale": 128.0},
        {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "offload_mode": "speculative",
        },
    ],
)
def test_unscaled_gradients_are_refused_before_anything_is_stepped(
    settings: dict[str, Any],
) -> None:
    model, stack = fp16(**settings)
    before = copy.deepcopy(stack.state_dict())
    loss_of(model).backward()
    assert stack.metrics()["loss_scale"] > 1.0  # whoever looks does not scale
    with pytest.raises(RuntimeError, match=NOT_SCALED):
        stack.step()
    assert all(
        torch.equal(value, stack.state_dict()["state"][index][key])
        for index, state in before["state"].items()
        for key, value in state.items()
    )
    stack.zero_grad()
    stack.scale_loss(loss_of(model)).backward()
    stack.step()
    stack.zero_grad()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=NOT_SCALED):
        stack.step()


def test_a_closure_may_scale_and_a_step_may_be_taken_twice() -> None:
    model, stack = fp16(initial_loss_scale=2.0**10)

    def closure() -> Tensor:
        stack.zero_grad()
        loss = loss_of(model)
        stack.scale_loss(loss).backward()
        return loss

    assert stack.step(closure) > 0
    assert stack.step().success

    def unscaled() -> Tensor:
        stack.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=NOT_SCALED):
        stack.step(unscaled)


def test_a_scale_of_one_asks_for_nothing() -> None:
    model, stack = fp16(loss_scale=1.0)
    loss_of(model).backward()
    assert stack.step().success


def test_torchs_scaler_on_top_of_ours_is_refused() -> None:
    model = regression(torch.float32)
    stack = get_megatron_optimizer(OptimizerConfig(lr=1e-2, fp16=True), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(RuntimeError, match="GradScaler leave fp16 off"):
        scaler.step(stack)


def test_the_trainer_is_told_that_it_does_not_scale(tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = regression(torch.float16)

        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.net(inputs.half()).float() - 1.0).square().mean()}

    def losses(**settings: Any) -> list[float]:
        model = Model()
        stack = get_megatron_optimizer(OptimizerConfig(lr=1e-2, fp16=True, **settings), model)
        arguments = TrainingArguments(
            tmp_path,
            max_steps=6,
            per_device_train_batch_size=4,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=[{"inputs": torch.ones(8)}] * 24,
            optimizers=(stack, torch.optim.lr_scheduler.ConstantLR(stack, 1.0)),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with pytest.raises(RuntimeError, match=r"HF Trainer.*loss_scale=1.0"):
        losses()
    trained = losses(loss_scale=1.0)
    assert trained[-1] < 0.9 * trained[0]


def test_fabric_and_accelerate_are_told_and_take_the_scaled_loss() -> None:
    from accelerate import Accelerator
    from lightning_fabric import Fabric

    fabric, accelerator = Fabric(accelerator="cpu", devices=1), Accelerator(cpu=True)
    for backward, setup in (
        (fabric.backward, fabric.setup),
        (accelerator.backward, accelerator.prepare),
    ):
        model, stack = fp16(initial_loss_scale=2.0**10)
        wrapped, theirs = setup(model, stack)
        backward(loss_of(wrapped))
        with pytest.raises(RuntimeError, match=NOT_SCALED):
            theirs.step()
        theirs.zero_grad()
        backward(stack.scale_loss(loss_of(wrapped)))
        theirs.step()
        assert stack.metrics()["steps"] == 1 and stack.metrics()["grad_norm"] > 1e-3


# -- no gradient at all ---------------------------------------------------------------------------


def warned(work: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_steps_of_a_copy_that_is_not_trained_are_said_once(precision: str) -> None:
    model, stack = build(precision)
    trained = copy.deepcopy(model)

    def work() -> None:
        for step in range(3):
            stack.scale_loss(trained(tokens_of(step))).backward()
            stack.step()

    count = sum(len(group["params"]) for group in stack.param_groups)
    messages = warned(work)
    assert (
        len(messages) == 1
        and f"none of the optimizer's {count} parameters has a gradient" in messages[0]
    )


def test_adapters_that_came_after_the_optimizer_are_named() -> None:
    import peft

    model = regression(torch.float32)
    stack = get_megatron_optimizer(OptimizerConfig(lr=1e-2), model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    loss_of(adapted).backward()
    (message,) = warned(stack.step)
    assert (
        "4 trainable parameters that the optimizer does not know" in message and "lora_A" in message
    )
    fresh = get_megatron_optimizer(OptimizerConfig(lr=1e-2), adapted)
    assert warned(fresh.step) == [] and fresh.metrics()["grad_norm"] > 0


def test_only_parameters_that_came_later_are_named() -> None:
    model = regression(torch.float32)
    stack = get_megatron_optimizer(OptimizerConfig(lr=1e-2), model)
    model.add_module("late", nn.Linear(2, 2, bias=False))
    (message,) = warned(stack.step)
    assert "1 trainable parameters that the optimizer does not know: late.weight. " in message


def test_an_expert_part_without_tokens_is_nothing_to_warn_of() -> None:
    model, stack = build("bf16")
    for name, param in model.named_parameters():
        param.grad = None if "experts" in name else torch.ones_like(param)
    assert warned(stack.step) == []


# -- skipped again and again ----------------------------------------------------------------------


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
        (torch.float16, {"fp16": True}, 1),  # at its minimum of 1 after 33 of them
    ],
)
def test_the_1st_10th_and_100th_skipped_step_in_a_row_names_the_parameter(
    dtype, settings, count
) -> None:
    model = regression(dtype)
    stack = get_megatron_optimizer(OptimizerConfig(lr=1e-2, **settings), model)
    messages = skipped(stack, model, 105)
    assert len(messages) == count and all(
        "the gradient of 2.weight holds an inf or nan" in text for text in messages
    )
    assert "100 steps in a row" in messages[-1]


@pytest.mark.parametrize("clip_grad", [1.0, 0.0])
def test_a_good_step_ends_the_row_and_a_dynamic_scale_finds_its_place_in_silence(
    clip_grad: float,
) -> None:
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


def test_a_threshold_that_skips_everything_is_said() -> None:
    model = regression()
    stack = get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, bf16=True, grad_norm_skip_threshold=1e-9), model
    )

    def work() -> None:
        for _ in range(12):
            loss_of(model).backward()
            stack.step()

    (message,) = warned(work)
    assert "10 steps in a row" in message and "over grad_norm_skip_threshold=1e-09" in message


# -- ranks ----------------------------------------------------------------------------------------


def test_stages_of_a_pipeline_compare_notes(tmp_path: Path) -> None:
    run_ranks("standstill", 2, str(tmp_path))
    for rank, found in enumerate(torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)):
        assert (
            found["norm"] == pytest.approx(math.sqrt(8))
            and found["refused"] is True
            and found["stub"] is True
        )
        culprit = "the gradient of stage1 holds" if rank == 1 else "on another rank"
        assert len(found["said"]) == 1 and culprit in found["said"][0]


# -- what is said before the first step -----------------------------------------------------------


def step_without_values() -> None:
    """The optimizer of a model on the meta device can be described, and not stepped."""
    model = regression().to("meta")
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True), model)
    assert sum(row.bytes for row in optimizer.describe().rows) > 0
    model(torch.ones(2, 8, dtype=torch.bfloat16, device="meta")).sum().backward()
    optimizer.step()


def step_of_a_model_that_got_its_values_later() -> None:
    """``to_empty`` makes new parameters, which the optimizer does not have."""
    model = regression().to("meta")
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True), model)
    model.to_empty(device="cpu")
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:none of the optimizer's")
@pytest.mark.parametrize("work", [step_without_values, step_of_a_model_that_got_its_values_later])
def test_parameters_without_values_are_named(work: Any) -> None:
    with pytest.raises(ValueError, match=r"0.weight is on the meta device.*to_empty"):
        work()


def test_mixed_precision_of_a_model_without_any_is_said() -> None:
    (message,) = warned(
        lambda: get_megatron_optimizer(
            OptimizerConfig(lr=1e-2, bf16=True), regression(torch.float32)
        )
    )
    assert "all parameters are float32" in message
    adapters = regression().requires_grad_(False)
    adapters.append(nn.Linear(4, 4))
    assert (
        warned(lambda: get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True), adapters)) == []
    )


@pytest.mark.parametrize(
    "work, message",
    [
        (
            lambda: get_megatron_optimizer(OptimizerConfig(lr=1e-2), None),
            "model is made of .'NoneType'",
        ),
        (
            lambda: get_megatron_optimizer(OptimizerConfig(lr=1e-2), regression().parameters()),
            "param_groups=",
        ),
        (lambda: get_megatron_optimizer(OptimizerConfig(lr=1e-2), []), "missing or empty"),
        (
            lambda: get_megatron_optimizer(regression().parameters(), lr=1e-3),
            r"OptimizerConfig\(lr=0.001\)",
        ),
        (
            lambda: get_megatron_optimizer(OptimizerConfig(lr=1e-2), regression(torch.float64)),
            r"convert .*\.float\(\)",
        ),
        (
            lambda: OptimizerConfig("adam", 1e-3),
            r"by name, as in OptimizerConfig\(optimizer='adam', lr=0.001\)",
        ),
    ],
)
def test_a_likely_mistake_names_its_cure(work: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        work()


# -- work during backward that is for nothing ------------------------------------------------------


@pytest.mark.parametrize("mode", ["overlap", "speculative"])
def test_gradients_that_are_clipped_outside_are_counted_and_said_once(mode: str) -> None:
    model = regression()
    stack = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2,
            bf16=True,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            offload_mode=mode,
        ),
        model,
    )

    def work(limit: float | None) -> None:
        for seed in range(4):
            stack.zero_grad()
            for part in (2 * seed, 2 * seed + 1):  # a later micro-batch is nobody's fault
                (loss_of(model, part) / 2).backward()
            finish_early_work(stack)
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            stack.step()

    for harmless in (None, math.inf):
        assert warned(partial(work, harmless)) == []
        assert stack.metrics()["speculation_stale"] == 0
    (message,) = warned(lambda: work(1e-3))
    assert "clip_grad_norm_" in message and stack.metrics()["speculation_stale"] >= 4


def test_warnings_point_at_the_line_of_the_program():
    model = nn.Linear(4, 4)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), model)
    with pytest.warns(UserWarning, match="has a gradient") as caught:
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]
