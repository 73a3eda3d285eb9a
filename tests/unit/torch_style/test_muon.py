"""``Muon(params)``: torch's steps for matrices, AdamW's for the rest."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mp_optim

# Newton-Schulz in bfloat16, by the same products in the same order: measured 1.4e-7.
TOLERANCE = 2e-6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 16)
        self.hidden = nn.Linear(16, 24)
        self.lm_head = nn.Linear(24, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.hidden(self.embed_tokens(tokens)))


@pytest.mark.parametrize("adjust", [{}, "original", "match_rms_adamw"])
def test_matrices_are_stepped_as_torch_does(adjust: str | dict[str, str]) -> None:
    chosen = {"adjust_lr_fn": adjust} if isinstance(adjust, str) else adjust
    weights = []
    for library in (mp_optim, torch.optim):
        torch.manual_seed(2)
        layer = nn.Linear(24, 16, bias=False)
        optimizer = library.Muon(layer.named_parameters(), lr=1e-2, **chosen)
        for _ in range(10):
            optimizer.zero_grad()
            layer(torch.randn(32, 24)).square().mean().backward()
            optimizer.step()
        weights.append(layer.weight)
    assert torch.allclose(*weights, rtol=0.0, atol=TOLERANCE)


def test_a_group_is_taken_apart_by_name() -> None:
    optimizer = mp_optim.Muon(Net().named_parameters(), lr=1e-3)
    found = {group["optimizer"]: group["param_names"] for group in optimizer.param_groups}
    assert found == {
        "muon": ["hidden.weight"],
        "adam": ["embed_tokens.weight", "hidden.bias", "lm_head.weight"],
    }


def test_without_names_it_says_what_it_cannot_tell() -> None:
    with pytest.warns(UserWarning, match="named_parameters"):
        optimizer = mp_optim.Muon(Net().parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]


@pytest.mark.parametrize("mark", [{"optimizer": "adam"}, {"use_muon": False}])
def test_a_group_that_says_which(mark: dict[str, object]) -> None:
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


def test_only_experts_of_three_dimensions_are_stacks_of_matrices() -> None:
    """The weight of a convolution has three, too."""
    marked = nn.Parameter(torch.ones(2, 4, 4))
    marked.allreduce = False  # Megatron's mark of an expert
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
def test_adamws_moments_are_stored_as_asked(
    state: str, first: torch.dtype, second: torch.dtype
) -> None:
    net = Net().bfloat16()
    optimizer = mp_optim.Muon(net.named_parameters(), state=state)
    net(torch.arange(11)).float().square().mean().backward()
    optimizer.step()
    adams, muons = (optimizer.state[net.lm_head.weight], optimizer.state[net.hidden.weight])
    assert (adams["exp_avg"].dtype, adams["exp_avg_sq"].dtype) == (first, second)
    assert muons["momentum_buffer"].dtype == first
