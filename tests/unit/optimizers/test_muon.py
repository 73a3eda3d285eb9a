"""``Muon(params)`` steps matrices like torch's Muon and other parameters like AdamW."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import OptimizerConfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 16)
        self.hidden = nn.Linear(16, 24)
        self.lm_head = nn.Linear(24, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.hidden(self.embed_tokens(tokens)))


class OddlyNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(11, 16)
        self.hidden = nn.Linear(16, 24)
        self.embed_like = nn.Linear(24, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)
        self.tied = nn.Linear(16, 11, bias=False)
        self.tied.weight = self.lookup.weight
        self.last = nn.Linear(16, 5, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.last


def by_factory(model: nn.Module) -> Any:
    return mp_optim.get_megatron_optimizer(OptimizerConfig(optimizer="muon", lr=1e-3), model)


def added(model: nn.Module) -> Any:
    named = list(model.named_parameters())
    optimizer = mp_optim.Muon(named[:1], model=model)
    optimizer.add_param_group({"params": named[1:]})
    return optimizer


BUILDERS: dict[str, Callable[[nn.Module], Any]] = {
    "named_parameters": lambda model: mp_optim.Muon(model.named_parameters()),
    "parameters": lambda model: mp_optim.Muon(model.parameters()),
    "group": lambda model: mp_optim.Muon([{"params": model.named_parameters()}]),
    "model": lambda model: mp_optim.Muon(list(model.parameters()), model=model),
    "added": added,
    "factory": by_factory,
}


@pytest.mark.parametrize("build", BUILDERS)
def test_muon_gives_embeddings_and_heads_to_adamw_by_module_type(build: str) -> None:
    model = OddlyNamed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = BUILDERS[build](model)
    rules = {
        id(param): group["optimizer"]
        for group in optimizer.param_groups
        for param in group["params"]
    }
    hidden = [model.hidden.weight, model.embed_like.weight, model.down.weight]
    assert [rules[id(weight)] for weight in hidden] == ["muon"] * 3
    assert rules[id(model.lookup.weight)] == rules[id(model.last.weight)] == "adam"
    notes = "\n".join(optimizer.choice_notes())
    assert "in Embedding" in notes and "in the output layer" in notes
    assert notes in str(optimizer.describe())


TABLES = [
    *("transformer.wte.weight", "transformer.wpe.weight", "gpt_neox.embed_in.weight"),
    *("embed_out.weight", "backbone.embeddings.weight", "shared.weight", "tok_embeddings.weight"),
    *("output.weight", "text_model.embeddings.token_embedding.weight", "pos_embed", "head.weight"),
    *(
        "classifier.weight",
        "score.weight",
        "layers.5.lm_head.w_out.weight",
        "value_embeds.0.weight",
    ),
    *("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "lm_head.weight"),
]
HIDDEN = [
    *("transformer.h.0.attn.c_attn.weight", "encoder.layer.0.output.dense.weight", "0.weight"),
    *("layers.0.shared_experts.up_proj.weight", "layers.0.attention.output.weight", "fc1.weight"),
    *("time_embedding.linear_1.weight", "layers.0.classifier_free.weight", "encoder.proj.weight"),
]


def test_muon_gives_embeddings_and_heads_to_adamw_by_common_names() -> None:
    named = [(name, nn.Parameter(torch.ones(8, 4))) for name in (*TABLES, *HIDDEN)]
    found = {
        group["optimizer"]: group["param_names"] for group in mp_optim.Muon(named).param_groups
    }
    assert found == {"muon": HIDDEN, "adam": TABLES}


def test_muon_warns_when_neither_names_nor_modules_identify_embeddings() -> None:
    with pytest.warns(UserWarning, match="without names"):
        optimizer = mp_optim.Muon(list(Net().parameters()))
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]
    tall = nn.ModuleDict({"vocabulary": nn.Linear(16, 2048, bias=False)})
    for build in (BUILDERS["named_parameters"], by_factory):
        with pytest.warns(UserWarning, match=r"vocabulary\.weight: its shape \(2048, 16\)"):
            build(tall)


@pytest.mark.parametrize("mark", [{"optimizer": "adam"}, {"use_muon": False}])
def test_muon_uses_the_optimizer_that_a_param_group_names(mark: dict[str, object]) -> None:
    net = Net()
    groups = [
        {"params": [net.hidden.weight], "use_muon": True, "optimizer": "muon"},
        {"params": [net.embed_tokens.weight, net.lm_head.weight], **mark},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = mp_optim.Muon(groups)
        optimizer.add_param_group({"params": net.hidden.bias, **mark})
    rules = [group["optimizer"] for group in optimizer.param_groups]
    assert rules == ["muon", "adam", "adam"]
    net(torch.arange(11)).square().mean().backward()
    optimizer.step()
    assert optimizer.last_step.success


def test_muon_steps_3d_experts_as_matrix_stacks_but_not_convolutions() -> None:
    marked = nn.Parameter(torch.ones(2, 4, 4))
    marked.allreduce = False  # Megatron marks an expert by this attribute.
    named = [
        ("conv.weight", nn.Conv1d(4, 4, 3).weight),
        ("layers.0.experts.up", nn.Parameter(torch.ones(2, 4, 4))),
        ("layers.0.mlp.marked", marked),
    ]
    found = {
        group["optimizer"]: group["param_names"] for group in mp_optim.Muon(named).param_groups
    }
    assert found["adam"] == ["conv.weight"] and len(found["muon"]) == 2


@pytest.mark.parametrize(
    ("state", "first", "second"),
    [
        ("8bit", torch.int8, torch.uint8),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp16", torch.float16, torch.float16),
    ],
)
def test_muon_stores_adamw_moments_in_the_requested_state_form(
    state: str, first: torch.dtype, second: torch.dtype
) -> None:
    net = Net().bfloat16()
    optimizer = mp_optim.Muon(net.named_parameters(), state=state)
    net(torch.arange(11)).float().square().mean().backward()
    optimizer.step()
    saved = dict(zip(optimizer.state, optimizer.state_dict()["state"].values(), strict=True))
    adams, muons = (saved[net.lm_head.weight], saved[net.hidden.weight])
    assert (adams["exp_avg"].dtype, adams["exp_avg_sq"].dtype) == (first, second)
    assert muons["momentum_buffer"].dtype == first


def test_muon_with_8bit_state_stores_one_byte_per_element_and_trains_like_fp32() -> None:
    losses = {}
    for state in ("fp32", "8bit"):
        torch.manual_seed(3)
        layer, target = nn.Linear(64, 64, bias=False), torch.randn(64, 64) / 8
        optimizer = mp_optim.Muon(layer.named_parameters(), lr=2e-2, weight_decay=0.0, state=state)
        for step in range(150):
            optimizer.param_groups[0]["lr"] = 2e-2 * (1 - step / 150)
            inputs = torch.randn(128, 64)
            loss = (layer(inputs) - inputs @ target.T).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[state] = loss.item()
        stored = optimizer.state_dict()["state"][0]
        size = sum(value.nbytes for key, value in stored.items() if key != "step")
        assert size == (4 if state == "fp32" else 1) * 64 * 64 + (state == "8bit") * 4 * 16
    # Measured 0.0945 and 0.0946; the first loss is above 1.
    assert losses["fp32"] < 0.15 and losses["8bit"] < 1.02 * losses["fp32"]
