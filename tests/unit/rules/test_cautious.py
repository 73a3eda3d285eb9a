"""Cautious weight decay: equal bits in every backend and placement, and refused settings."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim.config.rules import KERNEL_RULES, RULES
from mp_optim.kernels import choose_backend
from mp_optim.kernels.reference import ReferenceBackend, step_with
from mp_optim.rules.rule_optimizer import RuleOptimizer
from support.kernel_cases import GROUP, KEYS, Case, lists_of

HOST = torch.device("cpu")
SWITCH = {"cautious_wd": True}
CAUTIOUS = [rule for rule in KERNEL_RULES if "cautious_wd" in RULES[rule].defaults]
FORMS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.int8, torch.uint8),
)


def group_of(rule: str, **settings: Any) -> dict[str, Any]:
    return {**GROUP, **settings, "betas": (0.9, 0.999)}


def all_of(lists: Any) -> list[torch.Tensor]:
    return [*lists.main, *lists.output, *chain(*lists.state.values())]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    same = (one == other) & (one.signbit() == other.signbit())
    return bool((same | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form[0]).removeprefix("torch."))
@pytest.mark.parametrize("rule", CAUTIOUS)
@pytest.mark.parametrize("odd", [False, True], ids=["plain values", "odd values"])
def test_native_cautious_decay_matches_the_reference_bits(rule, form, odd):
    native, _ = choose_backend("native", HOST)
    found = []
    for backend in (native, ReferenceBackend()):
        lists = lists_of(5, [0, 1, 257, 9000, 70001], KEYS[rule], Case(moments=form, odd=odd))
        for t in (2, 3):
            group = group_of(rule, **SWITCH)
            step_with(backend, rule.split()[-1], lists, group, t, 0.37)
        found.append(all_of(lists))
    assert all(map(same_bits, *found))


def params_and_gradients() -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    shapes = ((40, 30), (64, 16), (77,))
    params = [nn.Parameter(torch.randn(shape, generator=draw).bfloat16()) for shape in shapes]
    return params, [torch.randn(shape, generator=draw).bfloat16() for shape in shapes]


def trained(cls: Any, **settings: Any) -> list[torch.Tensor]:
    params, grads = params_and_gradients()
    named = [(f"layers.{at}.weight", param) for at, param in enumerate(params)]
    optimizer = cls(named, lr=0.01, weight_decay=0.1, **settings)
    for step in range(4):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.roll(step) if step % 2 else -grad
        optimizer.step()
    return [param.detach().clone() for param in params]


CLASSES_WITH = (mp_optim.AdamW, mp_optim.Lion, mp_optim.Muon)


@pytest.mark.parametrize("cls", CLASSES_WITH, ids=lambda cls: cls.__name__)
def test_cautious_decay_gives_equal_bits_in_every_placement(cls):
    plain, cautious = trained(cls), trained(cls, **SWITCH)
    assert not all(map(torch.equal, plain, cautious))
    for place in (
        {"offload": 1.0},
        {"offload": 1.0, "offload_mode": "overlap"},
        {"offload": 1.0, "offload_place": "streamed", "stream_window_bytes": "64KiB"},
        {"main_params": "remainder16"},
        {"backend": "reference"},
    ):
        assert all(map(torch.equal, cautious, trained(cls, **SWITCH, **place))), place


def test_cautious_decay_skips_elements_that_the_step_moves_away_from_zero():
    param = nn.Parameter(torch.tensor([1.0, 1.0, -1.0, -1.0]))
    param.grad = torch.tensor([1.0, -1.0, 1.0, -1.0])
    optimizer = mp_optim.AdamW([param], lr=0.1, weight_decay=0.5, eps=0.0, cautious_wd=True)
    optimizer.step()
    assert torch.allclose(param.detach(), torch.tensor([0.85, 1.1, -1.1, -0.85]))


@pytest.mark.parametrize("rule", [name for name in RULES if name not in (*CAUTIOUS, "muon")])
def test_cautious_decay_is_refused_by_rules_that_lack_the_setting(rule):
    with pytest.raises(ValueError, match=r"^cautious_wd=True: has no effect with optimizer="):
        mp_optim.OptimizerConfig(optimizer=rule, lr=1e-3, cautious_wd=True)
    optimizer = RuleOptimizer(rule, [nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["cautious_wd"] = True
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    with pytest.raises(ValueError, match=rf"cautious_wd=True: {rule} has no such setting"):
        optimizer.step()


def test_cautious_decay_is_refused_with_coupled_decay_or_torch_kernels():
    asked: dict[str, Any] = {"lr": 1e-3, **SWITCH}
    with pytest.raises(ValueError, match=r"^cautious_wd=True: needs decoupled_weight_decay=True"):
        mp_optim.OptimizerConfig(decoupled_weight_decay=False, **asked)
    with pytest.raises(
        ValueError, match=r"^cautious_wd=True: fused_backend='torch' has no kernels"
    ):
        mp_optim.OptimizerConfig(fused_backend="torch", **asked)
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match=r"cautious_wd=True: needs decoupled weight decay"):
        mp_optim.FusedAdam(params, adam_w_mode=False, **SWITCH)
    with pytest.raises(ValueError, match=r"cautious_wd=True: fused_backend='torch' has no kernels"):
        mp_optim.FusedAdam(params, backend="torch", **SWITCH)
    with pytest.raises(TypeError, match="unexpected argument 'cautious_wd'"):
        mp_optim.Adam(params, **SWITCH)
