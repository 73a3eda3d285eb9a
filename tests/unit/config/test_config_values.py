"""Every config field refuses an invalid value and names itself, or the optimizer steps to finite
numbers.

The fields are read from the dataclass, so a new field is tested without a change here.
"""

import dataclasses
import decimal
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer

pytestmark = pytest.mark.usefixtures("one_rank")


FIELDS = [spec.name for spec in dataclasses.fields(OptimizerConfig)]

OTHER_SETTINGS: list[dict[str, Any]] = [
    {"bf16": True},
    {"optimizer": "sgd"},
    {"optimizer": "lamb"},
    {"optimizer": "lion"},
    {"optimizer": "muon"},
    {"optimizer": "muon", "muon_coefficient_type": "simple", "muon_scalar_optimizer": "lion"},
    {"fp16": True},
    {"fp16": True, "loss_scale": 4.0},
    {
        "bf16": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "uint8",
        "stochastic_rounding": True,
    },
    {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "offload_mode": "speculative",
    },
    {"optimizer_cpu_offload": True, "optimizer_offload_fraction": "auto", "gpu_memory": 2**30},
    {"use_distributed_optimizer": True},
    {"decoupled_lr": 1e-2},
    {"min_lr": 0.0},
    {"skip_step_sigma_factor": 6.0},
    {"timers": lambda *_, **__: Timer()},
]
"""Settings that give other fields an effect; each field has an effect with at least one of them."""

NEEDED: dict[str, dict[str, Any]] = {
    "loss_scale_window": {"fp16": True},
    "bucket_size": {"use_distributed_optimizer": True},
    "offload_bucket_bytes": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
}
"""Settings that a field needs to have an effect."""

VALUES: list[Any] = [
    *(math.nan, math.inf, -math.inf, -1, -1.0, -0.5, 0, 0.0, 1, 1.0, 2, 2.0, 2.5, 7),
    *(1e308, 1e-308, 5e-324, 1e38, 1e11, 10**400, -(10**400), 2**31, 2**32, 2**63, 2**64),
    *(True, False, None, "", "1", "1e-3", "nan", "inf", "True", "auto", "adam", "Adam", "float32"),
    *("float32 ", "int8", "nn", "Tensor", b"adam", ["adam"], [1], (1,), (), [], {}, set(), {0}),
    *((-1,), (99999,), (0.0,), (1.5,), (True,), (0, 0), [0], range(1), range(0), "0", 1j),
    *(decimal.Decimal("0.5"), np.float32(1e-3), np.float64(1e-3), np.float32(np.nan)),
    *(np.float32(np.inf), np.int64(3), np.int64(-3), np.uint8(1), np.bool_(True), np.array(1e-3)),
    *(np.array([1.0, 2.0]), torch.tensor(1e-3), torch.tensor(True), torch.ones(2), torch.float64),
    *(torch.int8, torch.complex64, torch.uint8, object(), lambda: None, lambda name: None, print),
    *(int, OptimizerConfig),
]


class Timer:
    def start(self, barrier: bool = False) -> None: ...
    def stop(self) -> None: ...


def steps_to_finite_numbers(config: OptimizerConfig) -> None:
    torch.manual_seed(0)
    dtype = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else torch.float32
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)
    stack = get_megatron_optimizer(config, model)
    for _ in range(2):
        stack.zero_grad()
        stack.scale_loss(model(torch.ones(2, 4, dtype=dtype)).float().square().mean()).backward()
        stack.step()
    assert all(
        getattr(main, "local", main).isfinite().all() for _, main in stack.named_main_params()
    )


@pytest.mark.parametrize("field", FIELDS)
def test_config_refuses_any_value_by_field_name_or_trains_to_finite_numbers(field):
    did_something, stepped = False, set()
    for value in VALUES:
        for settings in OTHER_SETTINGS:
            try:
                config = OptimizerConfig(**{"lr": 1e-3, **settings, field: value})
            except (TypeError, ValueError) as error:
                assert any(name in str(error) for name in (field, *settings)), (
                    f"{field}={value!r}: {error!r}"
                )
                if f"{field}=" in str(error) and "has no effect" in str(error):
                    continue  # The field may have an effect with other settings.
                did_something = True
                break
            kept = repr(getattr(config, field))
            if kept not in stepped:
                stepped.add(kept)
                step(config, field)
            default = next(
                spec.default for spec in dataclasses.fields(config) if spec.name == field
            )
            did_something |= getattr(config, field) != default
            if getattr(config, field) != default:
                break
    assert did_something, f"no settings here give {field} an effect; add settings that do"


def step(config: OptimizerConfig, field: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            steps_to_finite_numbers(config)
        # Some values are refused only by the model or the operating system.
        except (TypeError, ValueError, OSError) as error:
            assert field in str(error), f"{field}={getattr(config, field)!r}: {error!r}"


@pytest.mark.parametrize(
    "name, value, kept",
    [
        ("lr", np.float32(0.5), 0.5),
        ("host_threads", np.int64(2), 2),
        ("bf16", np.bool_(True), True),
        ("optimizer", "AdamW", "adam"),
        ("lr", "1e-3", 1e-3),
        ("weight_decay", "2.5E-2", 2.5e-2),
        ("loss_scale_window", "500", 500),
        ("bucket_size", "4e7", 40_000_000),
        ("offload_bucket_bytes", "512MB", 512 * 10**6),
        ("offload_bucket_bytes", "1.5 GiB", 3 * 2**29),
        ("offload_bucket_bytes", "4096", 4096),
    ],
)
def test_config_converts_value_to_type_of_the_field(name, value, kept):
    needed = NEEDED.get(name, {})
    found = getattr(OptimizerConfig(**{**needed, name: value}), name)
    assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"lr": "fast"}, "lr='fast': must be a float | None, not a str"),
        ({"clip_grad": "nan"}, "clip_grad='nan': must be a float, not a str"),
        ({"betas": 0.9}, "betas=0.9: must be 2 numbers, for adam_beta1 and adam_beta2"),
        ({"betas": (0.9, 1.0)}, "adam_beta2=1.0: must be a finite number in [0, 1)"),
        ({"lr": torch.tensor(1.0)}, "give a number"),
        ({"gpu_memory": "60 apples"}, "gpu_memory='60 apples': must be a int | None"),
        ({"offload_bucket_bytes": "0MiB"}, "or text with a unit such as '64MiB'"),
        ({"lr": 10**400}, "lr=1000000000000000000000000000000000000000000000000000000000"),
        ({"optimizer": "adamw", "decoupled_weight_decay": False}, "AdamW decouples weight decay"),
        ({"optimizer": "adam8bit"}, "exp_avg_dtype='uint8'"),
        ({"optimizer": "adafactor"}, "; build mp_optim.Adafactor(params"),
        ({"optimizer": "StableAdamW"}, "build pytorch_optimizer.StableAdamW below Float16"),
        ({"optimizer": "ademamix"}, "build pytorch_optimizer.AdEMAMix below Float16"),
    ],
)
def test_config_error_says_expected_value_when_type_is_wrong(settings, message):
    with pytest.raises(ValueError) as caught:
        OptimizerConfig(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name, here",
    [
        ("gradient_clipping", "clip_grad"),
        ("momentum", "sgd_momentum"),
        ("optim", "optimizer"),
        ("zero_stage", "use_distributed_optimizer=True"),
        ("foreach", "fused_backend"),
        ("cpu_offload", "optimizer_cpu_offload"),
        ("use_8bit", "exp_avg_dtype='uint8'"),
        ("total_steps", "OptimizerParamScheduler"),
        ("ademamix_alpha", "pass it to mp_optim.Adafactor or pytorch_optimizer.AdEMAMix"),
        ("amsgrad", "AMSGrad is not supported"),
        ("weight_decy", "did you mean 'weight_decay'"),
    ],
)
def test_config_error_names_our_field_for_name_of_another_library(name, here):
    with pytest.raises(TypeError, match=f"no field '{name}'.*{here}"):
        OptimizerConfig(**{name: 1.0})
    with pytest.raises(TypeError) as caught:
        OptimizerConfig(zzyzx=1.0)
    assert "did you mean" not in str(caught.value)


BETAS = {"betas": (0.8, 0.95)}
LION = {"optimizer": "muon", "muon_scalar_optimizer": "lion"}
OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": "auto"}
LIKE_TORCH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"learning_rate": "3e-4"}, {"lr": 3e-4}),
    ({"max_grad_norm": 0.5}, {"clip_grad": 0.5}),
    ({**BETAS, "eps": 1e-6}, {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6}),
    ({"optimizer": "AdamW", "betas": [0.8, 0.95]}, {"adam_beta1": 0.8, "adam_beta2": 0.95}),
    ({**LION, **BETAS}, {**LION, "lion_beta1": 0.8, "lion_beta2": 0.95}),
    ({**OFFLOAD, "gpu_memory": "60GB"}, {**OFFLOAD, "gpu_memory": 60 * 10**9}),
    ({"optimizer": "lion", **BETAS}, {"optimizer": "lion", "lion_beta1": 0.8, "lion_beta2": 0.95}),
]


@pytest.mark.parametrize("typed, meant", LIKE_TORCH, ids=lambda settings: ", ".join(settings))
def test_config_accepts_torch_and_deepspeed_names_of_fields(typed, meant):
    assert OptimizerConfig(**typed) == OptimizerConfig(**meant)
    assert OptimizerConfig.from_dict(typed) == OptimizerConfig.from_dict(meant)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"learning_rate": 1e-3, "lr": 1e-4}, "learning_rate=0.001 and lr=0.0001 are the same"),
        ({"max_grad_norm": 1.0, "clip_grad": 1.0}, "max_grad_norm=1.0 and clip_grad=1.0"),
        ({"betas": (0.9, 0.95), "adam_beta2": 0.99}, r"betas=\(0.9, 0.95\) and adam_beta2=0.99"),
        ({"optimizer": "sgd", "betas": (0.9, 0.95)}, "optimizer='sgd' has no such setting"),
        ({"optimizer": "lion", "eps": 1e-8}, "eps=1e-08: optimizer='lion' has no such setting"),
    ],
)
def test_config_refuses_setting_given_twice_or_unknown_to_the_rule(settings, message):
    with pytest.raises(TypeError, match=message):
        OptimizerConfig(**settings)
