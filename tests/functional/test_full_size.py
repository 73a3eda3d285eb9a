"""Param groups and optimizer bytes of published models at full size, on the meta device."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim.param_groups.overrides import get_param_groups
from support.launch import ROOT
from training.config import TrainConfig
from training.loading import load_yaml
from training.models import build_model

FULL_SIZE = ROOT / "tests" / "functional" / "full_size"
PUBLISHED_PARAMS = {
    "mixtral_8x7b": 46.7e9,
    "qwen3_30b_a3b": 30.5e9,
    "qwen3_235b_a22b": 235.1e9,
    "deepseek_v3": 671e9,
    "olmoe_1b_7b": 6.9e9,
}
# Params of routed experts: layers * experts * 3 matrices * hidden size * expert width.
EXPERT_PARAMS = {
    "mixtral_8x7b": 32 * 8 * 3 * 4096 * 14336,
    "qwen3_30b_a3b": 48 * 128 * 3 * 2048 * 768,
    "qwen3_235b_a22b": 94 * 128 * 3 * 4096 * 1536,
    "deepseek_v3": 58 * 256 * 3 * 7168 * 2048,
    "olmoe_1b_7b": 16 * 64 * 3 * 2048 * 1024,
}
BYTES_OF_FP32_STATE = 12  # The state has a main param, a first and a second moment.
BYTES_OF_MOMENTS = 8  # An FP32 parameter is its own main param.

each_model = pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMS))


@functools.cache
def config_and_model(name: str) -> tuple[TrainConfig, nn.Module]:
    config = load_yaml(FULL_SIZE / f"{name}.yaml")
    return config, build_model(
        config.model, dtype=torch.bfloat16, device="meta", seq_length=config.data.seq_length
    )


@functools.cache
def groups_of(name: str) -> list[dict[str, Any]]:
    config, model = config_and_model(name)
    overrides = mp_optim.get_standard_config_overrides(config.optimizer)
    return get_param_groups([model], config.optimizer, overrides)


def count(name: str, wanted: Callable[[dict[str, Any]], bool] = lambda group: True) -> int:
    return sum(
        param.numel() for group in groups_of(name) if wanted(group) for param in group["params"]
    )


def test_full_size_configs_each_have_a_published_size():
    assert {path.stem for path in FULL_SIZE.glob("*.yaml")} == set(PUBLISHED_PARAMS)


@each_model
def test_full_size_param_count_is_within_1_percent_of_the_published_count(name):
    assert count(name) == pytest.approx(PUBLISHED_PARAMS[name], rel=0.01)


@each_model
def test_full_size_expert_groups_hold_exactly_the_routed_experts(name):
    assert count(name, lambda group: group["is_expert_parallel"]) == EXPERT_PARAMS[name]


@each_model
def test_full_size_groups_decay_matrices_and_not_vectors(name):
    for group in groups_of(name):
        for param in group["params"]:
            assert group["wd_mult"] == (0.0 if param.dim() == 1 else 1.0)


@each_model
def test_full_size_describe_reports_12_bytes_of_state_per_param(name):
    config, model = config_and_model(name)
    rows = mp_optim.get_megatron_optimizer(config.optimizer, model).describe().rows
    params = [param for group in groups_of(name) for param in group["params"]]
    expected = 4 * len(params)  # Each parameter has a step counter of 4 bytes.
    for param in params:  # Newer versions of transformers keep DeepSeek's routers in FP32.
        each = BYTES_OF_MOMENTS if param.dtype == torch.float32 else BYTES_OF_FP32_STATE
        expected += each * param.numel()
    assert sum(row.bytes for row in rows) == expected
