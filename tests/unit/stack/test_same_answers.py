"""What a precision wrapper tells about itself and its slots, every composite of wrappers tells too:
asked of the part that has the slot."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mp_optim import (
    ChainedOptimizer,
    DistributedOptimizer,
    MegatronOptimizer,
    get_megatron_optimizer,
)
from mp_optim.core.flat_shard import FlatShard
from mp_optim.core.quantized import quantize_weights
from mp_optim.mixed_precision.grad_norm import EXCLUDED, MAIN_NORM
from support.models import TinyMoE, config_for, is_expert, train


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    """One process with a process group."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SHARDED = {"use_distributed_optimizer": True}
KINDS = {
    "wrapper": (False, {}),
    "chain": (True, {}),
    "distributed": (False, SHARDED),
    "no_shard": (False, {**SHARDED, "data_parallel_sharding_strategy": "no_shard"}),
    "chain of distributed": (True, SHARDED),
}


def built(
    kind: str, precision: str = "bf16", fraction: float = 0.0
) -> tuple[nn.Module, MegatronOptimizer]:
    has_experts, settings = KINDS[kind]
    model = TinyMoE(torch.float32 if precision == "fp32" else torch.bfloat16, has_experts)
    for name, param in model.named_parameters():
        if is_expert(param, name):
            param.allreduce = False
    model.bias.shared = True
    model.dense.grad_norm_group = "dense"
    optimizer = get_megatron_optimizer(config_for(precision, fraction, **settings), model)
    expected = ChainedOptimizer if has_experts else DistributedOptimizer if settings else None
    assert expected is None or isinstance(optimizer, expected)
    assert isinstance(optimizer, MegatronOptimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return model, optimizer


def values_of(tensor: object) -> torch.Tensor:
    """The elements this rank has, flattened."""
    local = tensor.local if isinstance(tensor, FlatShard) else tensor
    assert isinstance(local, torch.Tensor)
    return local.detach().reshape(-1)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16-8bit"])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_the_main_param_of_a_slot_is_what_is_stepped_in_fp32(kind, fraction, precision):
    model, optimizer = built(kind, precision, fraction)
    train(model, optimizer, 2)
    named = dict(optimizer.named_main_params())
    params = dict(model.named_parameters())
    for slot in optimizer.slots():
        name = optimizer.slot_name(slot)
        main, param = optimizer.main_param(slot), params[name]
        assert type(main) is type(named[name]) and main.dtype == torch.float32
        assert main.shape == param.shape
        assert torch.equal(values_of(main), values_of(named[name]))
        rounded = values_of(main).to(param.dtype)
        assert torch.allclose(rounded.float(), values_of(param).float(), rtol=0.01)
    stepped = params["dense"]
    main = optimizer.main_param(
        next(slot for slot in optimizer.slots() if optimizer.slot_name(slot) == "dense")
    )
    if precision != "fp32":  # a main param holds bits that its parameter cannot
        assert not torch.equal(values_of(main), values_of(stepped).float())


@pytest.mark.parametrize("kind", KINDS)
def test_the_main_param_follows_what_was_written_to_the_model(kind):
    model, optimizer = built(kind)
    with torch.no_grad():
        model.dense.fill_(3.0)
    for slot in optimizer.slots():
        if optimizer.slot_name(slot) == "dense":
            assert (values_of(optimizer.main_param(slot)) == 3.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_counts_in_the_norm_that_its_parameter_names(kind):
    _, optimizer = built(kind)
    groups = {
        optimizer.slot_name(slot): optimizer.norm_key(slot).group for slot in optimizer.slots()
    }
    special = {"bias": EXCLUDED, "dense": "dense"}
    assert groups == {name: special.get(name, MAIN_NORM) for name in groups}


@pytest.mark.parametrize("kind", KINDS)
def test_no_parameters_are_quantized(kind):
    _, optimizer = built(kind)
    assert optimizer.has_quantized_params is False


def test_a_chain_knows_of_quantized_parameters_of_any_part():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8)).to(torch.bfloat16)
    model[1].weight.allreduce = False
    quantize_weights(model)
    optimizer = get_megatron_optimizer(config_for("bf16"), model)
    assert isinstance(optimizer, ChainedOptimizer)
    assert optimizer.has_quantized_params is True
