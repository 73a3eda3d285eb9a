"""State by slot: replaced tensors, round trips, empty parameters and foreign optimizers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from mp_optim.core import Slot, SlotUpdate
from mp_optim.rules.fused import FusedAdam, FusedLAMB

A, B = Slot(0, 0), Slot(0, 1)


def pair() -> list[Tensor]:
    return [torch.arange(4.0), torch.ones(2, 3)]


def updates(value: float = 1.0, **extra: Any) -> list[SlotUpdate]:
    return [
        SlotUpdate(A, torch.full((4,), value), **extra),
        SlotUpdate(B, torch.full((2, 3), value), **extra),
    ]


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB])
def test_fused_optimizer_keeps_state_when_a_param_is_replaced_by_equal_shape(cls):
    optimizer = cls(pair())
    optimizer.step_slots(updates())
    before = optimizer.slot_state(A)["exp_avg"].clone()
    optimizer.param_groups[0]["params"][0] = torch.zeros(4)
    assert torch.equal(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"], before)
    optimizer.param_groups[0]["params"][0] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"group0\.param0.*has shape \(5,\) now"):
        optimizer.slot_state(A)


def test_step_slots_steps_only_given_slots_and_increments_step_of_empty_params():
    mains = [torch.ones(3), torch.ones(3), torch.empty(0), torch.tensor(2.0)]
    optimizer = FusedLAMB(mains)
    optimizer.step_slots([SlotUpdate(Slot(0, i), torch.ones_like(mains[i])) for i in (0, 2, 3)])
    assert [optimizer.slot_state(Slot(0, i))["step"].item() for i in range(4)] == [1, 0, 1, 1]
    assert torch.equal(mains[1], torch.ones(3)) and mains[3].item() < 2.0


@pytest.mark.parametrize("moments", [torch.float32, torch.uint8])
def test_state_of_many_tensors_shares_one_allocation_without_changing_bits(moments, monkeypatch):
    def stepped() -> tuple[FusedAdam, dict[str, Any]]:
        mains = [torch.ones(300), torch.empty(0), torch.ones(5, 7), torch.ones(2)]
        optimizer = FusedAdam(mains, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
        for position in (0, 2):  # The other parameters get their state in the next step.
            optimizer.step_slots(
                [SlotUpdate(Slot(0, position), torch.full_like(mains[position], 0.5))]
            )
        optimizer.step_slots(
            [SlotUpdate(Slot(0, at), torch.full_like(main, -0.25)) for at, main in enumerate(mains)]
        )
        return optimizer, copy.deepcopy(optimizer.state_dict())

    _, expected = stepped()
    monkeypatch.setattr("mp_optim.host.host_memory.HUGE_FROM", 64)
    optimizer, found = stepped()
    first, last = (optimizer.slot_state(Slot(0, at))["exp_avg"] for at in (1, 3))
    assert first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert list(state) == list(found["state"][index])
        assert all(torch.equal(value, found["state"][index][key]) for key, value in state.items())
    fresh, _ = stepped()
    fresh.load_state_dict(found)
    assert all(
        torch.equal(value, fresh.slot_state(Slot(0, 0))[key])
        for key, value in found["state"][0].items()
    )
