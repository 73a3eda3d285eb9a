"""Inputs that torch tests its optimizers with, run over the classes of the same names."""

import sys
import types
import unittest
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mp_optim

# The module with torch's inputs imports expecttest, so a stand-in replaces that package.
sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db  # noqa: E402

NAMES = ("Adam", "AdamW", "SGD", "Adafactor", "Muon")
REFUSED = {"maximize", "amsgrad", "ns_coefficients"}
"""Settings that the rules of this package refuse by name. Adafactor is torch's own class."""
VALID_HERE = (
    *("beta parameter at index 0", "lr as a Tensor", "betas must be", r"betas\[0\]"),
    *("with/without names", "duplicate parameters", "2D parameters"),
)
"""Words of torch's messages about inputs that this package accepts: decays of 1, tensors as
settings, names in some groups only, a repeated parameter, vectors under Muon."""
INFOS = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in NAMES}
CASES = [
    pytest.param(name, given, id=f"{name}: {given.desc}")
    for name, info in INFOS.items()
    for given in info.optim_inputs_func(device="cpu")
]
ERRORS = [
    pytest.param(name, error, id=f"{name}: {str(error.error_regex)[:60]}")
    for name, info in INFOS.items()
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
    if not any(words in str(error.error_regex) for words in VALID_HERE)
]
REFUSALS = (ValueError, TypeError, RuntimeError)


def trained(make: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return FP32 parameters after ten steps: a matrix and a vector, or two matrices for Muon."""
    last = (8, 3) if make.__name__ == "Muon" else (3,)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((8, 8), last)]
    goals = [torch.randn_like(param) for param in params]
    optimizer = make(params, **deepcopy(kwargs))
    for _ in range(10):
        optimizer.zero_grad()
        sum(
            (param - goal).square().sum() for param, goal in zip(params, goals, strict=True)
        ).backward()
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize(("name", "given"), CASES)
def test_optimizer_classes_step_like_torch_for_inputs_of_torchs_test_suite(name, given):
    ours, theirs = getattr(mp_optim, name), INFOS[name].optim_cls
    if name != "Adafactor" and (refused := REFUSED & given.kwargs.keys()):
        with pytest.raises((ValueError, TypeError), match=refused.pop()):
            trained(ours, given.kwargs)
        return
    found, expected = trained(ours, given.kwargs), trained(theirs, given.kwargs)
    tolerance = 2e-3 if name == "Muon" else 1e-6  # torch's Newton-Schulz computes in bfloat16.
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "error"), ERRORS)
def test_optimizer_classes_refuse_inputs_that_torch_refuses(name, error):
    given = error.optimizer_error_input
    with pytest.raises(REFUSALS):
        optimizer = getattr(mp_optim, name)(given.params, **given.kwargs)
        if error.error_on is OptimizerErrorEnum.STEP_ERROR:
            optimizer.step()
