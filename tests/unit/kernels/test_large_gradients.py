"""A finite gradient, however large, makes no NaN out of finite state."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mp_optim

LARGE = [2e20, 1e30, 3.4e38]
"""The first value overflows when squared, the second value in the second moment, the third value
when rounded to bfloat16."""
STATES = ["fp32", "bf16", "fp16", "8bit", "4bit"]
NOISY = ["bf16", "8bit", "4bit"]


@dataclass(frozen=True)
class Case:
    """A rule with settings.

    Attributes:
        alone: True if the step of an element depends on the gradients of that element only.
    """

    cls: str
    settings: dict[str, Any]
    alone: bool = True


CASES = {
    "AdamW": Case("AdamW", {}),
    "AdamW without first moment": Case("AdamW", {"betas": (0.0, 0.999)}),
    "Adam": Case("Adam", {"weight_decay": 0.1}),
    "LAMB": Case("LAMB", {}, alone=False),
    "NVLAMB of sums": Case("LAMB", {"use_nvlamb": True, "grad_averaging": False}, alone=False),
    "SGD": Case("SGD", {"momentum": 0.9, "lr": 1e-3}),
    "Lion": Case("Lion", {}),
    "Muon": Case("Muon", {}, alone=False),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


class Run:
    """An optimizer over a bfloat16 matrix and an FP32 vector of three blocks of 256 elements."""

    def __init__(self, case: Case, **settings: Any) -> None:
        matrix = torch.ones(3, 200, dtype=torch.bfloat16)
        self.params = [nn.Parameter(matrix), nn.Parameter(torch.ones(600))]
        names = ("matrix", "vector")
        named = list(zip(names, self.params, strict=True))
        given = {"lr": 0.1, **case.settings, **settings}
        self.optimizer = getattr(mp_optim, case.cls)(named, **given)

    def step(self, gradient: float, element: int | None = None, large: float = 0.0) -> None:
        for param in self.params:
            param.grad = torch.full_like(param, gradient)
            if element is not None:
                most = torch.finfo(param.dtype).max
                param.grad.view(-1)[element] = max(-most, min(most, large))
        self.optimizer.step()
        assert self.optimizer.last_step.success

    def values(self) -> Tensor:
        found = torch.cat([param.detach().reshape(-1).float() for param in self.params])
        assert found.isfinite().all()
        return found


def bits_but(values: Tensor, element: int) -> Tensor:
    kept = torch.ones(len(values), dtype=torch.bool)
    kept[element::600] = False
    return values[kept].view(torch.int32)


SIZED = [
    pytest.param(case, state, noisy, LARGE[at % 3], id=f"{name}-{state}{'-noisy' * noisy}")
    for name, case in CASES.items()
    for at, (state, noisy) in enumerate(
        [*((state, False) for state in STATES), *((state, True) for state in NOISY)]
    )
]


@pytest.mark.parametrize(("case", "state", "noisy", "large"), SIZED)
def test_step_stays_finite_after_a_large_finite_gradient(case, state, noisy, large):
    """Kernels have the bits of ``reference`` (test_kernel_bits.py), so one backend is enough."""
    settings = {"state": state, "stochastic_rounding": noisy}
    ours, spared = (Run(case, **settings) for _ in range(2))
    for run in (ours, spared):
        run.step(0.5)
    ours.step(1.0, 300, -large)
    spared.step(1.0)
    if case.alone:
        expected = bits_but(spared.values(), 300)
        assert torch.equal(bits_but(ours.values(), 300), expected)
    for element in (None, 300, 301, None):
        ours.step(1.0, element, large)
        ours.values()


@pytest.mark.parametrize("name", CASES)
def test_step_stays_finite_when_the_first_gradient_is_large(name):
    case = CASES[name]
    for state in STATES:
        run = Run(case, state=state)
        for element in (0, 0, None, 1, 0):
            run.step(1.0, element, LARGE[-1])
            run.values()


@pytest.mark.parametrize(("state", "noisy"), [("fp16", False), ("8bit", True), ("4bit", False)])
def test_infinite_second_moment_changes_no_other_element_of_a_quantization_block(state, noisy):
    ours = Run(CASES["AdamW"], state=state, stochastic_rounding=noisy)
    theirs = Run(CASES["AdamW"])
    for element in (300, *[None] * 20):
        for run in (ours, theirs):
            run.step(1.0, element, 1e30)
        assert torch.equal(ours.values()[300::600], theirs.values()[300::600])
