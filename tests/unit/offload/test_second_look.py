"""A step uses work done during backward only if the gradients still have the same bits."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from mp_optim import get_megatron_optimizer
from mp_optim.mixed_precision.clip_and_skip import StepCounts
from mp_optim.offload.backward_grads import same_bits
from support.models import AdversarialTransfer, config_for
from support.offload import (
    MODES,
    build_mode,
    differing,
    finish_backward_work,
    hybrids,
    run,
    snapshot,
)

STEPS = 6
AfterBackward = Callable[[nn.Module, int], None]


def clip_to(limit: float) -> AfterBackward:
    def clip(model: nn.Module, step: int) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)

    return clip


def write(change: Callable[[Tensor], None]) -> AfterBackward:
    """Return a hook that changes elements of one gradient in every third step."""

    def after(model: nn.Module, step: int) -> None:
        if step % 3 == 2:
            change(model.dense.grad)

    return after


def one_bit(grad: Tensor) -> None:
    bits = grad.view(torch.int16)
    bits[3, 5] ^= 1


def sign(grad: Tensor) -> None:
    grad.neg_()  # The sum of squares does not change.


def zeros(grad: Tensor) -> None:
    grad.mul_(0.0)  # The zeros have both signs.


def swapped(grad: Tensor) -> None:
    grad.copy_(grad.flip(0))


def replaced(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        param.grad = param.grad.clone()


def trained(
    mode: str, after: AfterBackward, adversarial: bool, precision: str = "bf16"
) -> tuple[dict[str, Tensor], list[object], dict[str, float], list[str]]:
    model, optimizer = build_mode(
        mode, precision, 1.0, experts=False, adversarial=adversarial, clip_grad=0.0
    )

    def then(model: nn.Module, step: int) -> None:
        finish_backward_work(optimizer)
        after(model, step)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run(model, optimizer, STEPS, after_backward=then)
    texts = [str(one.message) for one in caught]
    written = [text for text in texts if "changed after backward" in text]
    return snapshot(model, optimizer), results, optimizer.metrics(), written


@pytest.mark.parametrize("adversarial", [True, False], ids=["accelerator", "host"])
@pytest.mark.parametrize(
    "after", [clip_to(math.inf), clip_to(1e6), replaced], ids=["inf", "large", "clone"]
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_step_keeps_backward_work_when_gradient_writes_change_no_bit(precision, after, adversarial):
    for mode in MODES:
        bits, results, metrics, said = trained(mode, after, adversarial, precision)
        if mode == "sync":
            expected, expected_results = bits, results
            continue
        assert differing(bits, expected) == [] and results == expected_results, mode
        # An accelerator repeats the work because the version or the memory changed.
        if not adversarial:
            assert said == [] and metrics["stale_buckets"] == 0, mode
    assert adversarial or metrics["speculation_hits"] == 3 * STEPS, metrics


@pytest.mark.parametrize("adversarial", [True, False], ids=["accelerator", "host"])
@pytest.mark.parametrize(
    "change", [one_bit, sign, zeros, swapped], ids=lambda change: change.__name__
)
def test_step_repeats_backward_work_when_gradient_bits_change_afterwards(change, adversarial):
    for mode in MODES:
        bits, results, metrics, said = trained(mode, write(change), adversarial)
        if mode == "sync":
            expected, expected_results = bits, results
            continue
        assert differing(bits, expected) == [] and results == expected_results, mode
        assert metrics["stale_buckets"] == STEPS // 3, mode
        assert len(said) == 1 and "clip_grad_norm_" in said[0], mode
    hits = 3 * STEPS - STEPS // 3  # Only the changed bucket is stepped again.
    assert metrics["speculation_hits"] == hits


@pytest.mark.parametrize("mode", ["overlap", "speculative"])
def test_step_uses_gradients_assigned_by_hand_after_an_interrupted_step(mode, monkeypatch):
    bits = []
    for name in ("sync", mode):
        model, optimizer = build_mode(name, "fp32", 1.0, experts=False, adversarial=False)
        run(model, optimizer, 2)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(StepCounts, "record", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(model, optimizer, 1)
        for param in model.parameters():
            param.grad = -torch.ones_like(param)
        optimizer.step()
        bits.append(snapshot(model, optimizer))
    assert differing(*bits) == []


def sharded_run(
    mode: str, limit: float, adversarial: bool
) -> tuple[list[Tensor], dict[str, float]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]).bfloat16()
    fully_shard(model)
    config = config_for("bf16", 1.0, clip_grad=0.0, offload_mode=mode)
    optimizer = get_megatron_optimizer(config, model)
    for hybrid in hybrids(optimizer):
        if adversarial:
            hybrid.stepper.use_transfer(AdversarialTransfer())
    for seed in range(6):
        inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(inputs.bfloat16()).float().square().mean().backward()
        finish_backward_work(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    params = [param.to_local().detach() for param in model.parameters()]
    return params, optimizer.metrics()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:.*gradients changed after backward")
@pytest.mark.parametrize("adversarial", [True, False], ids=["accelerator", "host"])
@pytest.mark.parametrize("limit", [math.inf, 1e-3])
def test_offload_modes_give_equal_bits_when_fsdp_gradients_are_clipped_outside(limit, adversarial):
    expected, _ = sharded_run("sync", limit, adversarial)
    for mode in MODES[1:]:
        params, metrics = sharded_run(mode, limit, adversarial)
        assert all(map(same_bits, params, expected)), mode
        assert (metrics["stale_buckets"] == 0) == (limit == math.inf), mode
    if limit == math.inf:
        assert metrics["speculation_hits"] >= 5


@pytest.mark.parametrize("mode", ["overlap", "speculative"])
def test_metrics_count_stale_buckets_of_all_members_when_expert_gradients_change(mode):
    model, optimizer = build_mode(mode, fraction=1.0, adversarial=False, clip_grad=0.0)

    def then(model: nn.Module, step: int) -> None:
        finish_backward_work(optimizer)
        model.experts["up"].grad.neg_()

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        run(model, optimizer, 2, after_backward=then)
    assert optimizer.metrics()["stale_buckets"] == 2
