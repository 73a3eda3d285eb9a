"""Muon in the whole stack: placements, precisions, fused weights and ranks."""

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import ParamKey, get_megatron_optimizer, get_standard_config_overrides
from support.launch import results_of_ranks
from support.models import TinyMoE, config_for, is_expert, same_bits
from support.workers import muon as muon_worker

pytestmark = pytest.mark.usefixtures("one_thread")


def build(precision="bf16", fraction=0.0, seed=0, **settings):
    settings = {"optimizer": "muon", "muon_scale_mode": "shape_scaling", **settings}
    model = TinyMoE(
        {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
            precision.split("-")[0]
        ],
        seed=seed,
    )
    model.embed.is_embedding_or_output_parameter = True
    config = config_for(precision, fraction, **settings)
    return model, get_megatron_optimizer(config, model, expert_predicate=is_expert)


def test_muon_config_gives_matrices_to_muon_and_other_params_to_adam():
    _, optimizer = build()
    rules = {
        name: group["optimizer"]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert rules == {
        "embed": "adam",
        "dense": "muon",
        "router": "muon",
        "bias": "adam",
        "scale": "adam",
        "experts.up": "muon",
        "experts.down": "muon",
    }
    keys = {
        name: set(state)
        for name, state in zip(
            (n for g in optimizer.param_groups for n in g["param_names"]),
            optimizer.state.values(),
            strict=True,
        )
    }
    assert keys["dense"] == {"step", "momentum_buffer", "master_param"}
    assert keys["embed"] == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    text = str(optimizer.describe())
    assert "torch's matrix products" in text and "native" in text


def test_muon_config_overrides_select_rule_and_scale_mode():
    model = TinyMoE(torch.float32)
    config = config_for("fp32", optimizer="muon")
    overrides = {
        **get_standard_config_overrides(config),
        ParamKey(name="embed"): {"optimizer": "adam", "max_lr": 1e-3},
        ParamKey(name="router"): {"scale_mode": "unit_rms_norm"},
    }
    optimizer = get_megatron_optimizer(config, model, overrides)
    of = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert (of["embed"]["optimizer"], of["embed"]["lr"]) == ("adam", 1e-3)
    assert (of["router"]["scale_mode"], of["dense"]["scale_mode"]) == ("unit_rms_norm", "spectral")
    for override, reason in (
        ({"optimizer": "lion"}, "optimizer='lion' differs"),
        ({"optimizer": "muon"}, r"bias has shape \(8,\): muon steps only matrices"),
        ({"sacle_mode": "spectral"}, "did you mean 'scale_mode'"),
    ):
        with pytest.raises(ValueError, match=reason):
            get_megatron_optimizer(config, model, {ParamKey(name="bias"): override})


class Megatron(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.config = type("Config", (), sizes)()
        self.table = nn.Embedding(5, 8)
        self.linear_qkv = nn.Linear(8, 2 * (4 + 2 + 2), bias=False)


def test_muon_splits_fused_qkv_weights_by_the_model_config():
    config = config_for("fp32", optimizer="muon")
    model = Megatron(num_attention_heads=4, num_query_groups=2, kv_channels=2)
    optimizer = get_megatron_optimizer(config, model)
    of = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert of["table.weight"]["optimizer"] == "adam"
    assert of["linear_qkv.weight"]["qkv_split_shapes"] == (4, 2, 2)
    with pytest.raises(
        ValueError, match=r"linear_qkv\.weight is a fused QKV weight and muon_split_qkv=True"
    ):
        get_megatron_optimizer(config, Megatron())
    with pytest.raises(ValueError, match="16 rows, which are not a multiple"):
        get_megatron_optimizer(
            config, Megatron(num_attention_heads=4, num_query_groups=2, kv_channels=3)
        )
    unsplit = get_megatron_optimizer(
        config_for("fp32", optimizer="muon", muon_split_qkv=False), Megatron()
    )
    assert all(group["qkv_split_shapes"] is None for group in unsplit.param_groups)


@pytest.mark.parametrize(
    ("sizes", "attribute", "parts"),
    [
        ({"kv_channels": 1, "attention_output_gate": True}, None, (2, 2, 1, 1)),
        ({"kv_channels": 2}, [2, 1, 1], (2, 1, 1)),
        ({"kv_channels": 2, "attention_output_gate": False}, None, (4, 2, 2)),
    ],
)
def test_muon_splits_fused_qkv_weights_by_output_gate_or_param_attribute(sizes, attribute, parts):
    model = Megatron(num_attention_heads=4, num_query_groups=2, **sizes)
    model.linear_qkv = nn.Linear(8, 2 * sum(parts), bias=False)
    if attribute:
        model.linear_qkv.weight.qkv_split_shapes = attribute
    optimizer = get_megatron_optimizer(config_for("fp32", optimizer="muon"), model)
    assert {group.get("qkv_split_shapes") for group in optimizer.param_groups} == {parts, None}


def trained(model, optimizer):
    torch.manual_seed(4)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("style", ["config", "torch"])
@pytest.mark.parametrize("marked", ["0", "1"])
def test_muon_gives_a_matrix_with_use_muon_false_to_adam(style, marked):
    def build(by_mark):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6, bias=False))
        named = dict(model.named_parameters())
        name = f"{marked}.weight"
        if by_mark:
            named[name].use_muon = False
        if style == "config":
            override = {ParamKey(name=name): {"optimizer": "adam"}}
            config = config_for("fp32", optimizer="muon")
            return model, get_megatron_optimizer(config, model, {} if by_mark else override)
        if by_mark:
            return model, mp_optim.Muon(named.items(), lr=1e-2)
        alone = {"params": [(name, named.pop(name))], "optimizer": "adam"}
        return model, mp_optim.Muon([{"params": [*named.items()]}, alone], lr=1e-2)

    for ours, same in zip(trained(*build(True)), trained(*build(False)), strict=True):
        assert torch.equal(ours, same)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    return results_of_ranks("muon", 4, folder)


def test_muon_refuses_a_tensor_parallel_param_without_partition_dim(ranks):
    assert "wide is tensor_model_parallel and has no partition_dim" in ranks[0]["unknown partition"]


def test_blockwise_muon_orthogonalizes_each_tensor_parallel_part(ranks):
    expected = muon_worker.by_rows()
    differing = {
        n for n, value in expected.items() if not same_bits(ranks[0]["blockwise"][n], value)
    }
    assert {"wide", "tall", "narrow"} <= differing
    assert differing.isdisjoint({"experts.up", "experts.down", "embed", "bias"})


SHARED = [*muon_worker.OWNERS, *muon_worker.ZERO, "4 ranks, tensor parallel"]


@pytest.fixture(scope="module")
def one_process():
    return {late: muon_worker.alone(late) for late in ((), muon_worker.LATE)}


@pytest.mark.parametrize("case", SHARED)
def test_muon_divides_matrix_products_over_ranks_with_the_bits_of_one_process(
    ranks, one_process, case
):
    """ZeRO turns a missing gradient into zeros, so cases with ZeRO have another expected result
    than cases without ZeRO."""
    expected = one_process[() if case in muon_worker.ZERO else muon_worker.LATE]
    found = [rank["shares"][case] for rank in ranks if case in rank["shares"]]
    assert len(found) == (2 if case.startswith("2 ranks") else 4)
    for share in found:
        differing = [
            name
            for name, value in expected["mains"].items()
            if not same_bits(share["mains"][name], value)
        ]
        assert differing == []
    total, flops = expected["flops"], [share["flops"] for share in found]
    assert sum(flops) == total
    if "layer-wise" in case:  # One rank owns a whole stack of experts.
        assert max(flops) < total
    else:
        assert max(flops) <= 1.05 * total / len(found)
        assert flops == [share["told"] for share in found]
