"""The self-test detects a backend that is wrong in one element."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mp_optim
from mp_optim.config.rules import KERNEL_RULES
from mp_optim.kernels import choose_backend, selection
from mp_optim.kernels.kernel_args import TensorLists
from mp_optim.kernels.native import NativeBackend
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.self_test import SelfTest, prove
from support.kernels import needs_kernels

CPU = torch.device("cpu")
Spoil = Callable[[TensorLists], object]


class StandIn(ReferenceBackend):
    name = "triton"  # Triton declares every rule and every storage format.

    def __init__(self, rule: str, spoil: Spoil) -> None:
        self.spoiled, self.spoil = rule, spoil

    def _spoil(self, rule: str, lists: TensorLists) -> None:
        if rule == self.spoiled:
            self.spoil(lists)

    def step(self, rule: str, lists: TensorLists, scalars: Any, multiplier: Any) -> None:
        super().step(rule, lists, scalars, multiplier)
        self._spoil(rule, lists)

    def lamb(self, lists: TensorLists, scalars: Any, multiplier: Any) -> None:
        super().lamb(lists, scalars, multiplier)
        self._spoil("lamb", lists)


def proven(spoil: Spoil, rule: str = "adam") -> SelfTest:
    return prove(StandIn(rule, spoil), CPU)


def one_bit_off(tensor: Tensor) -> None:
    tensor.copy_(torch.nextafter(tensor, torch.full_like(tensor, torch.inf)))


def test_self_test_reports_a_correct_backend_as_exact():
    proof = proven(lambda lists: None)
    assert proof.usable and proof.exact and proof.reason == "same bits as reference"


def test_self_test_reports_the_auto_backend_as_exact():
    assert prove(choose_backend("auto", CPU)[0], CPU).exact


@pytest.mark.parametrize("rule", KERNEL_RULES)
@pytest.mark.parametrize("first", [0, 256])
def test_self_test_finds_a_wrong_bit_of_any_rule(first, rule):
    def spoil(lists: TensorLists) -> None:
        for main in lists.main:
            if main.dtype == torch.float32:
                one_bit_off(main[first:])

    proof = prove(StandIn(rule, spoil), CPU)
    assert proof.usable and not proof.exact and "differs" in proof.reason


@needs_kernels
@pytest.mark.parametrize(("factor", "usable"), [(1.0 + 2.0**-22, True), (1.01, False)])
def test_auto_uses_no_native_kernel_when_the_native_kernel_is_wrong(factor, usable, monkeypatch):
    """``auto`` uses ``reference`` instead. ``backend='native'`` is refused if the deviation of the
    kernel is large."""

    def trained(backend: str) -> Tensor:
        param = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 700))
        optimizer = mp_optim.AdamW([param], lr=0.01, backend=backend)
        param.grad = param.detach() * 0.5
        optimizer.step()
        return param.detach()

    assert choose_backend("native", CPU)[0].name == "native"
    step = NativeBackend.step

    def wrong(self: NativeBackend, rule: str, lists: TensorLists, *given: Any) -> None:
        step(self, rule, lists, *given)
        for main in lists.main:
            main.mul_(factor)

    selection.forget()
    monkeypatch.setattr(NativeBackend, "step", wrong)
    try:
        assert torch.equal(trained("auto"), trained("reference"))
        if usable:
            assert not torch.equal(trained("native"), trained("reference"))
        else:
            with pytest.raises(ValueError, match="'native' is not available: wrong: a first step"):
                trained("native")
    finally:
        selection.forget()


def test_self_test_names_the_cure_when_the_driver_is_older_than_the_assembler():
    class Refused(ReferenceBackend):
        name = "triton"

        def step(self, *arguments: Any) -> None:
            raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    found = prove(Refused(), torch.device("cpu"))
    assert not found.usable and "image is invalid. Triton's assembler is newer" in found.reason
    assert "TRITON_PTXAS_BLACKWELL_PATH" in found.reason
