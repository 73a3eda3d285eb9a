"""Defects of other optimizers reported in 2026; docs/upstream-defects.md has the table."""

import copy
import gc
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mp_optim
from mp_optim import OptimizerConfig, get_megatron_optimizer
from support.launch import results_of_ranks
from support.models import build, same_bits, train
from support.one_rank import one_rank
from support.workers.mixed_meshes import STEPS, built, grads_of, whole


def test_transformers_48208_grad_norm_is_exact_over_mixed_meshes(tmp_path):
    """Also transformers#47734, accelerate#4219, pytorch#180346, pytorch#180501, Megatron#6489."""
    ranks = results_of_ranks("mixed_meshes", 2, tmp_path)
    params = {name: nn.Parameter(tensor) for name, tensor in whole().items()}
    optimizer = built(params)
    for step in range(STEPS):
        squares = 0.0
        for name, grad in grads_of(step).items():
            params[name].grad = grad
            squares += float(grad.double().square().sum())
        optimizer.step()
        for rank in ranks:
            assert rank["norms"][step] == pytest.approx(math.sqrt(squares), rel=1e-12)
    for rank in ranks:
        # torch's own clipping raises this error.
        assert "mixed torch.Tensor and DTensor" in rank["refusal"]
        for name, param in params.items():
            assert same_bits(rank["weights"][name], param.detach()), name


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_megatron_5974_init_state_does_not_count_a_step(fraction):
    """Also Megatron#5976, torchtitan#4382: a dummy step that creates state leaves counts or
    moments, so
    the first real update is too small."""
    model, optimizer = build("bf16", fraction)
    fresh_model, fresh = build("bf16", fraction)
    optimizer.init_state()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
    assert train(model, optimizer, 2) == train(fresh_model, fresh, 2)
    for (_, mine), (_, theirs) in zip(
        optimizer.named_main_params(), fresh.named_main_params(), strict=True
    ):
        assert same_bits(mine.detach(), theirs.detach())


@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_deepspeed_8471_adamw_counts_steps_for_each_parameter(offload):
    """Also DeepSpeed#5104: a counter shared by many parameters gives a wrong bias correction to
    parameters
    without a gradient in some steps."""
    always, sometimes = (nn.Parameter(torch.ones(4)) for _ in range(2))
    ours = mp_optim.AdamW(
        [("always", always), ("sometimes", sometimes)], lr=0.1, weight_decay=0.0, offload=offload
    )
    twin = nn.Parameter(torch.ones(4))
    theirs = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.0)
    for step in range(6):
        always.grad = torch.full((4,), 0.5)
        sometimes.grad = twin.grad = None
        if step % 3 == 2:
            sometimes.grad, twin.grad = torch.full((4,), 0.25), torch.full((4,), 0.25)
        ours.step()
        theirs.step()
    assert [float(ours.state[each]["step"]) for each in (always, sometimes)] == [6.0, 2.0]
    torch.testing.assert_close(sometimes, twin, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_megatron_5071_step_continues_from_loaded_model_weights(fraction):
    """Also NeMo-RL#2371, NeMo-RL#2372, prime-rl#3234: after a checkpoint of the model alone, the
    first
    step restores the old main params."""
    pretrained = build("bf16", 0.0, seed=5)[0].state_dict()
    model, optimizer = build("bf16", fraction)
    model.load_state_dict(pretrained)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    train(model, optimizer, 1)
    for name, param in model.named_parameters():
        assert same_bits(param.detach(), pretrained[name]), name
    assert all(
        same_bits(main.detach().bfloat16(), pretrained[name])
        for name, main in optimizer.named_main_params()
        if pretrained[name].dtype == torch.bfloat16
    )


def test_accelerate_3979_bf16_params_accumulate_small_updates_in_fp32():
    """accelerate's upcast silently does nothing; this optimizer creates the FP32 main params
    itself."""
    model = nn.Linear(8, 8, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    config = OptimizerConfig(lr=1e-4, weight_decay=0.0, bf16=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, model)
    # Each update is too small for bfloat16, which has no number between 0.996 and 1.
    for _ in range(40):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    ((_, main),) = optimizer.named_main_params()
    assert main.dtype == torch.float32 and float(main.detach().max()) < 0.9975
    assert float(model.weight.detach().max()) < 1.0


def live_objects():
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


@pytest.mark.parametrize("offload", [0.0, 0.5])
def test_pytorch_188174_steps_under_fsdp2_keep_no_objects(offload):
    with one_rank():
        model = nn.Sequential(*[nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(4)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = mp_optim.AdamW(
            model.named_parameters(), lr=1e-3, offload=offload, max_grad_norm=1.0
        )

        def steps(count):
            for _ in range(count):
                for param in model.parameters():
                    assert isinstance(param, DTensor)
                    param.grad = torch.ones_like(param)
                optimizer.step()
                optimizer.zero_grad()

        for _ in range(2):  # Caches fill in the first round and once more after a collection.
            steps(25)
            before = live_objects()
        steps(200)
        grown = {name: count for name, count in (live_objects() - before).items() if count > 2}
        assert grown == {}


def test_primerl_3561_offloaded_resume_keeps_group_settings_and_counts():
    def built(model):
        named = list(model.named_parameters())
        groups = [
            {"params": named[:2], "lr": 1e-2, "weight_decay": 0.1},
            {"params": named[2:], "lr": 3e-3, "betas": (0.8, 0.9)},
        ]
        return mp_optim.AdamW(groups, offload=1.0, state="8bit")

    def step(model, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for index, param in enumerate(model.parameters()):
            if index < 2 or seed % 2:  # The second group is stepped half as often.
                values = torch.randn(param.shape, generator=generator)
                param.grad = values.to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).bfloat16()
    optimizer = built(model)
    for seed in range(4):
        step(model, optimizer, seed)
    optimizer.param_groups[1]["lr"] = 1e-3  # A schedule has set this rate.
    resumed = copy.deepcopy(model)
    later = built(resumed)
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for old, new in zip(optimizer.param_groups, later.param_groups, strict=True):
        assert {name: old[name] for name in ("lr", "betas", "weight_decay")} == {
            name: new[name] for name in ("lr", "betas", "weight_decay")
        }
    counts = [float(later.state[param]["step"]) for param in resumed.parameters()]
    assert counts == [4.0, 4.0, 2.0, 2.0]
    for seed in range(4, 7):
        step(model, optimizer, seed)
        step(resumed, later, seed)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
