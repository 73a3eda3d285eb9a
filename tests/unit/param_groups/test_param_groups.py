import dataclasses
import logging
import pickle

import pytest
import torch
from torch import nn

from mp_optim import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    check_config_overrides_consistency,
    get_megatron_optimizer,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from mp_optim.core.param_attributes import is_expert_param
from mp_optim.param_groups.overrides import check_each_in_one_group, get_param_groups

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)


@pytest.fixture(scope="module")
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    with torch.device("meta"):
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                num_local_experts=2,
            )
        )


def test_param_groups_separate_experts_and_norms_of_a_hugging_face_moe(mixtral):
    groups = get_param_groups([mixtral], CONFIG, get_standard_config_overrides(CONFIG))
    experts = [
        name for group in groups if group["is_expert_parallel"] for name in group["param_names"]
    ]
    assert sorted(experts) == [
        f"model.layers.{i}.mlp.experts.{w}" for i in (0, 1) for w in ("down_proj", "gate_up_proj")
    ]
    no_decay = [
        name for group in groups if group["weight_decay"] == 0.0 for name in group["param_names"]
    ]
    assert no_decay and all("norm" in name for name in no_decay)
    names = [name for group in groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in mixtral.named_parameters())
    check_each_in_one_group([mixtral], groups)


def test_expert_params_are_found_by_name_or_allreduce_attribute_except_shared_experts():
    param = nn.Parameter(torch.ones(1))
    assert is_expert_param(param, "mlp.experts.down_proj")
    assert not is_expert_param(param, "mlp.shared_experts.experts.w")
    assert not is_expert_param(param, "mlp.w")
    param.allreduce = False
    assert is_expert_param(param, "mlp.w")


def test_decoupled_lr_applies_to_embeddings_and_the_output_layer(mixtral):
    config = OptimizerConfig(lr=1e-3, decoupled_lr=5e-3, decoupled_min_lr=1e-4)
    groups = get_param_groups([mixtral], config, get_standard_config_overrides(config))
    decoupled = {name for g in groups if g["is_decoupled_lr"] for name in g["param_names"]}
    assert decoupled == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(g["lr"] == 5e-3 and g["min_lr"] == 1e-4 for g in groups if g["is_decoupled_lr"])


def test_qk_layernorm_keeps_weight_decay_when_requested():
    model = nn.ModuleDict({"q_norm": nn.LayerNorm(2), "norm": nn.LayerNorm(2)})
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, apply_wd_to_qk_layernorm=True)
    groups = get_param_groups([model], config, get_standard_config_overrides(config))
    decayed = {name for g in groups if g["weight_decay"] for name in g["param_names"]}
    assert decayed == {"q_norm.weight", "q_norm.bias"}


def test_param_key_matches_when_any_condition_matches():
    param = nn.Parameter(torch.ones(2, 2))
    param.special = True
    assert ParamKey(name="*.weight").matches(param, "a.weight")
    assert ParamKey(name=("x", "a.*")).matches(param, "a.weight")
    assert ParamKey(attr="special").matches(param, "b")
    assert ParamKey(predicate=ParamPredicate("2d", lambda p: p.ndim == 2)).matches(param, "b")
    assert ParamKey(with_name_predicate=ParamWithNamePredicate("b", lambda p, n: n == "b")).matches(
        param, "b"
    )
    assert not ParamKey(name="c", attr="other").matches(param, "b")
    assert ParamKey(predicate=ParamPredicate("x", lambda p: True)) == ParamKey(
        predicate=ParamPredicate("x", lambda p: False)
    )


def test_mup_scales_lr_of_matrices_for_adam_and_of_vectors_for_sgd():
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(4, 4), "hidden": nn.Linear(4, 4)})
    groups = get_param_groups([model], CONFIG, get_mup_config_overrides(CONFIG, 4.0))
    by_name = {name: g for g in groups for name in g["param_names"]}
    assert by_name["hidden.weight"]["lr"] == 1e-3 / 4
    assert by_name["hidden.weight"]["eps"] == 1e-8 / 4
    assert by_name["embed_tokens.weight"]["lr"] == by_name["hidden.bias"]["lr"] == 1e-3
    groups = get_param_groups([model], CONFIG, get_mup_config_overrides(CONFIG, 4.0, "sgd"))
    by_name = {name: g for g in groups for name in g["param_names"]}
    assert by_name["hidden.bias"]["lr"] == 4e-3 and by_name["hidden.weight"]["lr"] == 1e-3
    muon = dataclasses.replace(CONFIG, optimizer="muon")
    assert get_mup_config_overrides(muon, 4.0) == {}
    with pytest.raises(ValueError, match="mup_width_mult=0"):
        get_mup_config_overrides(CONFIG, 0)


@pytest.mark.parametrize("optimizer_type", ["adam", "sgd"])
def test_standard_and_mup_overrides_give_equal_groups_after_pickling(optimizer_type):
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(4, 4), "hidden": nn.Linear(4, 4)})
    config = dataclasses.replace(CONFIG, decoupled_lr=1e-5)
    mup = get_mup_config_overrides(CONFIG, 4.0, optimizer_type)
    for overrides in (get_standard_config_overrides(config), mup):
        restored = pickle.loads(pickle.dumps(overrides))
        expected, groups = (
            get_param_groups([model], config, each) for each in (overrides, restored)
        )
        assert len(expected) > 1
        for group, other in zip(expected, groups, strict=True):
            assert {**group, "params": []} == {**other, "params": []}


def test_decoupled_lr_and_mup_find_embeddings_and_heads_by_module_type():
    model = nn.ModuleDict(
        {
            **{"wte": nn.Embedding(4, 4), "lookup": nn.Embedding(4, 4)},
            **{"hidden": nn.Linear(4, 4), "embed_in": nn.Linear(4, 4)},
            "classifier": nn.Linear(4, 2),
        }
    )
    tables = {"wte.weight", "lookup.weight", "classifier.weight"}
    config = dataclasses.replace(CONFIG, decoupled_lr=1e-5)
    groups = get_param_groups([model], config, get_standard_config_overrides(config))
    decoupled = {name for g in groups if g["is_decoupled_lr"] for name in g["param_names"]}
    assert decoupled - {"classifier.bias"} == tables
    groups = get_param_groups([model], CONFIG, get_mup_config_overrides(CONFIG, 4.0))
    kept = {name for g in groups if g["max_lr"] == CONFIG.lr for name in g["param_names"]}
    assert {name for name in kept if name.endswith("weight")} == tables


def test_param_groups_refuse_conflicting_overrides_and_unsupported_params_by_name(caplog):
    model = nn.Linear(2, 2)
    overrides = {
        ParamKey(name="weight"): {"max_lr": 1.0},
        ParamKey(attr="requires_grad"): {"max_lr": 2.0},
    }
    with pytest.raises(ValueError, match="weight: overrides disagree on max_lr"):
        get_param_groups([model], CONFIG, overrides)
    with pytest.raises(ValueError, match="optimizer='sgd' differs"):
        check_config_overrides_consistency(CONFIG, {ParamKey(): {"optimizer": "sgd"}})
    with caplog.at_level(logging.WARNING):
        get_param_groups([model], CONFIG, {ParamKey(name="typo"): {"wd_mult": 0.0}})
    assert "matches no trainable parameter" in caplog.text
    with pytest.raises(ValueError, match="lr=None"):
        get_param_groups([model], OptimizerConfig(), None)
    complex_model = nn.ParameterDict({"c": nn.Parameter(torch.ones(1, dtype=torch.complex64))})
    with pytest.raises(TypeError, match=r"c is torch\.complex64"):
        get_param_groups([complex_model], CONFIG, None)


def test_param_groups_list_tied_params_once_and_skip_frozen_params():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    groups = get_param_groups([first, second], CONFIG, None)
    assert [n for g in groups for n in g["param_names"]] == ["0.weight", "0.bias"]


def test_factory_refuses_groups_that_miss_or_repeat_a_trainable_param():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="bias is in 0 param groups"):
        get_megatron_optimizer(CONFIG, model, param_groups=[{"params": [model.weight]}])
    with pytest.raises(ValueError, match="weight is in 2 param groups"):
        check_each_in_one_group(
            [model], [{"params": list(model.parameters())}, {"params": [model.weight]}]
        )


def test_factory_refuses_a_frozen_model_unless_param_groups_are_given():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match=r"no trainable parameter .2 are frozen"):
        get_megatron_optimizer(CONFIG, model)
    optimizer = get_megatron_optimizer(
        CONFIG, model, param_groups=[{"params": list(model.parameters())}]
    )
    assert optimizer.step().success
    model.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    assert optimizer.step().success and not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    "override, message",
    [
        ({"maxlr": 1.0}, "override maxlr=1.0.*did you mean 'max_lr'"),
        ({"lr": 1.0}, "use max_lr"),
        ({"weight_decay": 1.0}, "use wd_mult"),
        ({"momentum": 0.5}, "param groups of 'adam' have no such setting"),
        ({"max_lr": 1e-9}, "below min_lr"),
    ],
)
def test_config_overrides_are_refused_when_an_override_has_no_effect(override, message):
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4)
    with pytest.raises(ValueError, match=message):
        get_param_groups([nn.Linear(2, 2)], config, {ParamKey(name="*"): override})


def test_config_overrides_accept_a_list_for_betas():
    groups = get_param_groups(
        [nn.Linear(2, 2)], OptimizerConfig(lr=1e-3), {ParamKey(name="*"): {"betas": [0.8, 0.9]}}
    )
    assert groups[0]["betas"] == (0.8, 0.9) and "min_lr" not in groups[0]
