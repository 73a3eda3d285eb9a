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
from support.launch import results_of_ranks
from support.models import build, same_bits, train
from support.one_rank import one_rank
from support.workers.mixed_meshes import STEPS, built, grads_of, whole


def test_transformers_48208_grad_norm_is_exact_over_mixed_meshes(tmp_path):
    """Related reports: transformers#47734, accelerate#4219, pytorch#180346, pytorch#180501 and
    Megatron#6489."""
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
    """Related reports: Megatron#5976 and torchtitan#4382. A dummy step that creates state leaves
    counts or moments, so the first real update is too small."""
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
