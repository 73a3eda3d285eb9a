"""What the self-test of a backend shows: stand-ins that are wrong in one place only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mp_optim.config.rules import KERNEL_RULES
from mp_optim.kernels import choose_backend
from mp_optim.kernels.kernel_args import TensorLists
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.self_test import RECORDED, SelfTest, digests, prove, prove_by_a_step

CPU = torch.device("cpu")
SMALLEST_NORMAL = 2.0**-126
Spoil = Callable[[TensorLists], object]


class StandIn(ReferenceBackend):
    """``reference``, but for what ``spoil`` does to the lists after a step of ``rule``."""

    name = "triton"  # which claims every rule and every form of state

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


def test_one_that_is_right_is_exact() -> None:
    proof = proven(lambda lists: None)
    assert proof.usable and proof.exact and proof.reason == "same bits as reference"


@pytest.mark.parametrize("rule", KERNEL_RULES)
@pytest.mark.parametrize("first", [2048, 8192, 16384])
def test_elements_from_a_whole_tile_or_chunk_on(first: int, rule: str) -> None:
    def spoil(lists: TensorLists) -> None:
        for main in lists.main:
            if main.dtype == torch.float32:
                one_bit_off(main[first:])

    assert not proven(spoil, rule).exact


@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_misaligned_tensors(rule: str) -> None:
    def spoil(lists: TensorLists) -> None:
        for main in lists.main:
            if main.dtype == torch.float32 and main.data_ptr() % 16:
                one_bit_off(main)

    assert not proven(spoil, rule).exact


@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_gradients_in_fp16(rule: str) -> None:
    def spoil(lists: TensorLists) -> None:
        if lists.grad[0].dtype == torch.float16:
            for output in lists.output:
                assert output is not None
                output[-1:].mul_(1.001)

    assert not proven(spoil, rule).exact


def test_second_moments_that_are_flushed() -> None:
    def spoil(lists: TensorLists) -> None:
        for moment in lists.state["exp_avg_sq"]:
            if moment.dtype == torch.float32:
                moment[moment < SMALLEST_NORMAL] = 0.0

    proof = proven(spoil)
    assert proof.usable and not proof.exact
    assert "denormal" in proof.reason


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_divisions_and_roots_that_take_denormals_for_0(key: str) -> None:
    """What is stored is right: only the step itself is that of a 0."""

    def spoil(lists: TensorLists) -> None:
        for main, moment in zip(lists.main, lists.state[key], strict=True):
            if main.dtype == moment.dtype == torch.float32:
                denormal = (moment != 0.0) & (moment.abs() < SMALLEST_NORMAL)
                main[denormal] = 0.0

    proof = proven(spoil)
    assert proof.usable and not proof.exact


def test_state_in_8_bits() -> None:
    def spoil(lists: TensorLists) -> None:
        if lists.state["exp_avg"][0].dtype == torch.int8:
            lists.state["exp_avg_sq"][1][-1] += 1

    assert not proven(spoil).exact


def test_noise_that_is_left_out() -> None:
    class ToNearest(ReferenceBackend):
        name = "triton"

        def step(self, rule: str, lists: TensorLists, scalars: Any, multiplier: Any) -> None:
            super().step(rule, replace(lists, noise=None), scalars, multiplier)

    assert not prove(ToNearest(), CPU).exact


def test_sums_from_a_second_chunk_on() -> None:
    class FirstChunk(ReferenceBackend):
        name = "triton"

        def sum_of_squares(self, tensors: Any) -> Tensor:
            return super().sum_of_squares([tensor[:16384] for tensor in tensors])

    assert not prove(FirstChunk(), CPU).exact


class OnDevice(ReferenceBackend):
    """Takes multipliers on the device, and heeds the flag of all rules but one."""

    name = "triton"
    takes_device_multipliers = True

    def __init__(self, deaf: str) -> None:
        self.deaf = deaf

    def _number(self, rule: str, multiplier: Any) -> float | None:
        if not isinstance(multiplier, Tensor):
            return float(multiplier)
        return float(multiplier[0]) if rule == self.deaf or multiplier[1] == 0.0 else None

    def step(self, rule: str, lists: TensorLists, scalars: Any, multiplier: Any) -> None:
        if (number := self._number(rule, multiplier)) is not None:
            super().step(rule, lists, scalars, number)

    def lamb(self, lists: TensorLists, scalars: Any, multiplier: Any) -> None:
        if (number := self._number("lamb", multiplier)) is not None:
            super().lamb(lists, scalars, number)


def test_a_flag_that_is_set_changes_nothing() -> None:
    assert prove(OnDevice(""), CPU).exact
    for rule in KERNEL_RULES:
        proof = prove(OnDevice(rule), CPU)
        assert not proof.exact and not proof.usable and "wrong" in proof.reason


# -- by a step ------------------------------------------------------------------------------------


def test_recorded_bits_are_those_of_reference_and_of_what_auto_takes() -> None:
    assert (
        digests(ReferenceBackend(), CPU) == RECORDED == digests(choose_backend("auto", CPU)[0], CPU)
    )


@pytest.mark.parametrize("rule", KERNEL_RULES)
@pytest.mark.parametrize("first", [0, 256])
def test_one_step_notices_a_bit_of_any_rule(first: int, rule: str) -> None:
    def spoil(lists: TensorLists) -> None:
        for main in lists.main:
            if main.dtype == torch.float32:
                one_bit_off(main[first:])

    proof = prove_by_a_step(StandIn(rule, spoil), CPU)
    assert proof.usable and not proof.exact and "ulp" in proof.reason


@pytest.mark.parametrize(
    "key", ["exp_avg", "exp_avg_sq", "exp_avg_scale", "remainder", "averaged_param"]
)
def test_one_step_notices_state_in_few_bits(key: str) -> None:
    def spoil(lists: TensorLists) -> None:
        if "remainder" in lists.state:
            for tensor in lists.state[key]:
                tensor[:1] += 1

    stand_in = StandIn("adam", spoil)
    assert digests(stand_in, CPU) != RECORDED
    assert not prove_by_a_step(stand_in, CPU).exact


def test_one_step_notices_sums() -> None:
    class AWhole(ReferenceBackend):
        name = "triton"

        def sum_of_squares(self, tensors: Any) -> Tensor:
            return super().sum_of_squares(
                [tensor[: len(tensor) // 256 * 256] for tensor in tensors]
            )

    assert not prove_by_a_step(AWhole(), CPU).exact


def test_what_is_right_by_a_step_is_proven_whole_on_demand() -> None:
    """The whole proof knows sizes that a step does not."""

    def spoil(lists: TensorLists) -> None:
        for main in lists.main:
            if main.dtype == torch.float32:
                one_bit_off(main[2048:])

    stand_in = StandIn("adam", spoil)
    assert prove_by_a_step(stand_in, CPU).exact and not prove(stand_in, CPU).exact


def test_a_driver_that_refuses_the_assemblers_code_is_named() -> None:
    class Refused(ReferenceBackend):
        name = "triton"

        def step(self, *arguments: Any) -> None:
            raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    found = prove(Refused(), torch.device("cpu"))
    assert not found.usable and "image is invalid. The driver does not take" in found.reason
    assert "TRITON_PTXAS_BLACKWELL_PATH" in found.reason
