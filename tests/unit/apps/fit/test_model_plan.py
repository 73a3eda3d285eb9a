"""The planner's bytes equal the bytes of the tensors that an optimizer then holds."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.apps.fit.model_plan import Layout, ParamSpec, plan, smallest_fraction
from mp_optim.factory.memory_plan import memory_of
from mp_optim.factory.offload_fraction import with_fraction
from support.models import DTYPES, config_for
from support.offload import CountingTransfer, hybrids

GIB = 2**30


class Bag(nn.Module):
    """A module with parameters of given shapes; some are experts' and some are frozen."""

    def __init__(self, specs: list[ParamSpec]) -> None:
        super().__init__()
        for index, spec in enumerate(specs):
            param = nn.Parameter(
                torch.zeros(spec.shape, dtype=spec.dtype), requires_grad=spec.trainable
            )
            if spec.is_expert:
                param.allreduce = False
            self.register_parameter(f"p{index}", param)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[ParamSpec], OptimizerConfig]:
    kind = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    half, shapes_of = DTYPES[kind], st.lists(st.integers(0, 40), max_size=3).map(tuple)
    specs = []
    for index, shape in enumerate(draw(st.lists(shapes_of, min_size=1, max_size=8))):
        dtype = draw(st.sampled_from([half, half, half if kind == "fp32" else torch.float32]))
        is_expert, is_trained = draw(st.booleans()), index == 0 or draw(st.integers(0, 4)) > 0
        specs.append(ParamSpec(f"p{index}", shape, dtype, is_expert, is_trained))
    rule = draw(st.sampled_from(["adam", "lamb", "lion", "sgd"]))
    settings_of: dict[str, object] = {"optimizer": rule, "lr": 1e-3}
    settings_of |= {"bf16": kind == "bf16", "fp16": kind == "fp16"}
    if draw(st.booleans()) and kind != "fp32":
        moment = st.sampled_from(["float32", "bfloat16", "float16", "uint8"])
        settings_of["use_precision_aware_optimizer"] = True
        settings_of["exp_avg_dtype"] = draw(st.one_of(moment, st.just("uint4")))
        if rule in ("adam", "lamb"):
            settings_of["exp_avg_sq_dtype"] = draw(moment)
        if {"uint8", "uint4"} & {settings_of["exp_avg_dtype"], settings_of.get("exp_avg_sq_dtype")}:
            settings_of["fp32_state_below"] = draw(st.sampled_from([0, 5, 1000]))
        if kind == "bf16":
            forms = [{}, {"param_remainder_bits": 8}, {"store_param_remainders": False}]
            settings_of |= draw(st.sampled_from(forms))
    if draw(st.booleans()):
        settings_of["ema_decay"] = 0.9
    config = OptimizerConfig(**settings_of)
    fraction = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    return specs, with_fraction(config, fraction)


@given(models())
@settings(max_examples=40, deadline=None)
def test_plan_equals_bytes_of_real_tensors_for_random_models(case):
    specs, config = case
    model = Bag(specs)
    optimizer = get_megatron_optimizer(config, model)
    for hybrid in hybrids(optimizer):  # The plan is for an accelerator, so host buffers count.
        hybrid.stepper.use_transfer(CountingTransfer())
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    optimizer.get_loss_scale()  # A step in FP16 raises unless get_loss_scale() was called before.
    optimizer.step()
    real, planned = memory_of(optimizer, config), plan(model, config)
    without = dataclasses.replace(planned.accelerator, model_params=0, grads=0)
    assert without == real.accelerator
    assert planned.pinned_host == real.pinned_host and planned.pageable_host == real.pageable_host
    assert planned.disk.total == 0
    assert planned.accelerator.model_params == sum(param.nbytes for param in model.parameters())
    assert planned.accelerator.grads == sum(
        param.nbytes for param in model.parameters() if param.requires_grad
    )


def test_plan_divides_parameters_among_tensor_expert_and_fsdp2_ranks():
    config = OptimizerConfig(lr=1e-3, bf16=True)
    specs = [
        ParamSpec("dense.weight", (64, 32)),
        ParamSpec("norm.weight", (64,)),
        ParamSpec("mlp.experts.down", (8, 16, 32), is_expert=True),
    ]

    def params(**sizes: object) -> int:
        return plan(specs, config, Layout(**sizes)).accelerator.model_params // 2  # type: ignore[arg-type]

    assert params() == 64 * 32 + 64 + 8 * 16 * 32
    assert params(tp=2) == 32 * 32 + 64 + 8 * 8 * 32
    assert params(dp=4, ep=4) == 64 * 32 + 64 + 2 * 16 * 32
    assert params(dp=4, sharding="fsdp2") == 16 * 32 + 16 + 2 * 16 * 32
    assert params(dp=4, ep=4, sharding="fsdp2") == 16 * 32 + 16 + 2 * 16 * 32


def test_smallest_fraction_fits_in_memory_and_a_64th_less_does_not():
    specs = [ParamSpec(f"layer{index}.weight", (128, 128)) for index in range(64)]
    config = OptimizerConfig(lr=1e-3, bf16=True)
    limit = 10 * 2**20
    found = smallest_fraction(specs, config, gpu_memory=limit)
    assert found.accelerator.total <= limit
    assert plan(specs, with_fraction(config, found.fraction - 1 / 64)).accelerator.total > limit
    assert smallest_fraction(specs, config, gpu_memory=GIB).fraction == 0.0
    with pytest.raises(ValueError, match="more ranks"):
        smallest_fraction(specs, config, gpu_memory=2**20)
    with pytest.raises(
        ValueError, match=r"host_memory=1000 bytes: .* needs [0-9.]+ (bytes|MiB|GiB) on the host"
    ):
        smallest_fraction(specs, config, gpu_memory=limit, host_memory=1000)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_plan_counts_a_copy_of_all_saved_tensors_for_background_saves(fraction):
    model = nn.Linear(1000, 500, bias=False, dtype=torch.bfloat16)
    for decay, each in ((None, 2 + 4 + 8), (0.9, 2 + 4 + 8 + 4)):
        config = config_for("bf16", fraction, ema_decay=decay)
        assert plan(model, config).background_save // 500_000 == each
        assert "a save in the background: at most 0.00" in str(plan(model, config))


SEVEN_BILLION = [ParamSpec(f"layer{index}.weight", (4096, 4096)) for index in range(402)]


@pytest.mark.parametrize("limit", [24, 12])
def test_plan_error_names_gib_and_memory_saving_settings_when_a_model_does_not_fit(limit):
    config = OptimizerConfig(lr=1e-5, bf16=True)
    with pytest.raises(ValueError, match="on the host the accelerator still") as caught:
        smallest_fraction(SEVEN_BILLION, config, gpu_memory=limit * GIB)
    said = str(caught.value)
    assert f"gpu_memory={limit}.00 GiB" in said and "needs 25.12 GiB" in said
    released = re.search(r"release_gradients=True\), which needs (\d+\.\d+) GiB", said)
    assert released and 12.56 <= float(released[1]) < 25.12  # The parameters take 12.56 GiB.
    assert "LoRA" in said and "quantize_weights" in said


def test_plan_error_omits_release_gradients_when_the_config_refuses_that_setting():
    config = OptimizerConfig(lr=1e-5, bf16=True, use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="still needs") as caught:
        smallest_fraction(SEVEN_BILLION[:8], config, gpu_memory=2**20)
    assert "release_gradients" not in str(caught.value) and "LoRA" in str(caught.value)


def test_plan_error_omits_release_gradients_when_it_would_save_nothing():
    model = nn.Embedding(1 << 20, 512, device="meta", dtype=torch.bfloat16)
    config = OptimizerConfig(lr=1e-5, bf16=True)
    with pytest.raises(ValueError, match="still needs") as caught:
        smallest_fraction(model, config, gpu_memory=GIB)
    assert "release_gradients" not in str(caught.value) and "LoRA" in str(caught.value)


def auto(**settings: object) -> OptimizerConfig:
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": "auto"}
    return OptimizerConfig(lr=1e-3, bf16=True, **offload, **settings)


def linears(count: int = 16) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(count))).bfloat16()
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4])
def test_auto_offload_fraction_is_the_smallest_that_fits(share):
    everything = plan(linears(), OptimizerConfig(lr=1e-3, bf16=True)).accelerator
    limit = (
        everything.model_params
        + everything.grads
        + int(share * (everything.total - everything.model_params - everything.grads))
    )
    optimizer = get_megatron_optimizer(auto(gpu_memory=limit), linears())
    chosen = optimizer.config
    assert chosen.optimizer_cpu_offload == (share < 1.0)
    used = plan(linears(), chosen)
    assert used.accelerator.total <= limit
    if share < 1.0:
        less = with_fraction(chosen, chosen.optimizer_offload_fraction - 1 / 64)
        assert plan(linears(), less).accelerator.total > limit
    real = memory_of(optimizer, chosen)
    assert dataclasses.replace(used.accelerator, model_params=0, grads=0) == real.accelerator


def test_auto_offload_fraction_error_names_the_argument_when_none_can_be_chosen():
    with pytest.raises(ValueError, match=r"gpu_memory=1000: .*'1000GiB'"):
        get_megatron_optimizer(auto(gpu_memory=1000), linears())
    with pytest.raises(ValueError, match="param_groups="):
        get_megatron_optimizer(
            auto(), linears(), param_groups=[{"params": list(linears().parameters())}]
        )
    with pytest.raises(ValueError, match="a plan needs a number"):
        plan(linears(), auto())
    with pytest.raises(ValueError, match="gpu_memory=1000: has no effect"):
        OptimizerConfig(lr=1e-3, gpu_memory=1000)
    with pytest.raises(
        ValueError, match="optimizer_offload_fraction='half': must be between 0 and 1, or 'auto'"
    ):
        OptimizerConfig(lr=1e-3, optimizer_cpu_offload=True, optimizer_offload_fraction="half")
