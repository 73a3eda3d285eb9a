"""Averaged main params follow one formula in every backend and rule."""

import pytest
import torch
from torch import nn

from mp_optim.core.slot_state import AVERAGE
from mp_optim.muon.muon import MuonRule
from mp_optim.rules.rule import NAMED_RULES
from mp_optim.rules.rule_optimizer import RuleOptimizer
from support.kernels import NEED_KERNELS
from support.models import same_bits

BACKENDS = {
    "reference": (*NAMED_RULES, MuonRule()),
    "native": ("adam", "lamb", "sgd", "lion"),
    "torch": ("adam", "sgd"),
    "apex": ("adam", "lamb", "sgd"),
    "transformer_engine": ("adam", "sgd"),
}


@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=NEED_KERNELS if name == "native" else []) for name in BACKENDS],
)
def test_averaged_weights_follow_the_formula_to_the_bit_in_each_rule_and_backend(backend, standins):
    """The formula is average + (1 - decay) * (main - average), each operation rounded to FP32. At
    the
    first step the average is the main param."""
    weight = torch.tensor(1 - 0.9, dtype=torch.float64).float()
    forms = [{}]
    if backend in ("reference", "native"):
        forms.append({"store_param_remainders": True, "param_remainder_bits": 8})
    for rule in BACKENDS[backend]:
        for form in forms:
            dtype = torch.bfloat16 if form else torch.float32
            params = [torch.randn(shape) for shape in ((37, 5), (2, 9001), (5, 4, 3))]
            params = [nn.Parameter(param.to(dtype)) for param in params]
            optimizer = RuleOptimizer(rule, params, lr=1e-2, backend=backend, ema_decay=0.9, **form)
            expected = None
            for _ in range(3):
                for param in params:
                    param.grad = torch.randn_like(param)
                optimizer.step()
                now = [optimizer.main_param(slot).detach() for slot in optimizer.slots()]
                expected = [
                    main.clone() if before is None else before + (main - before) * weight
                    for main, before in zip(now, expected or [None] * 3, strict=True)
                ]
                found = [optimizer.state[param][AVERAGE] for param in params]
                assert all(map(same_bits, found, expected)), (rule, form)
