"""State dicts are loaded by slot: a load checks everything first and converts each state once."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from mp_optim import FusedAdam
from mp_optim.core import Slot
from mp_optim.core.slot_state import SlotState
from support.models import build, train


def stepped(*sizes: int) -> FusedAdam:
    params = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = FusedAdam(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


@dataclass(frozen=True, eq=False, kw_only=True)
class Counting(SlotState):
    """A slot state that counts the calls of its methods."""

    calls: Counter[str]

    def fit(self, *args):
        assert not self.calls["load"]
        self.calls["fit"] += 1
        return super().fit(*args)

    def load(self, state):
        self.calls["load"] += 1
        super().load(state)


class CountingAdam(FusedAdam):
    """An optimizer with :class:`Counting` slot states."""

    calls: Counter[str]

    def state_of(self, slot: Slot) -> SlotState:
        state = super().state_of(slot)
        return Counting(state.store, slot, state.name, calls=self.calls)


def test_load_state_dict_fits_and_loads_each_state_once():
    saved = stepped(5, 7).state_dict()
    optimizer = CountingAdam([torch.nn.Parameter(torch.ones(size)) for size in (5, 7)])
    optimizer.calls = Counter()
    optimizer.load_state_dict(saved)
    assert optimizer.calls == {"fit": 2, "load": 2}


def test_load_state_dict_refuses_wrong_shape_before_loading_any_slot():
    saved = stepped(5, 7).state_dict()
    saved["state"][1]["exp_avg"] = torch.zeros(8)
    optimizer = CountingAdam([torch.nn.Parameter(torch.ones(size)) for size in (5, 7)])
    optimizer.calls = Counter()
    with pytest.raises(ValueError, match=r"exp_avg: saved shape \(8,\), expected \(7,\)"):
        optimizer.load_state_dict(saved)
    assert optimizer.calls["load"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-8bit", "bf16-remainder"])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_slot_state_exports_same_tensors_as_the_optimizer(precision, fraction):
    model, optimizer = build(precision, fraction)
    train(model, optimizer, 2)
    for slot in optimizer.slots():
        state = optimizer.state_of(slot)
        shown, full = optimizer.slot_state(slot), optimizer.full_slot_state(slot)
        assert state.is_required() and state.exported().keys() == shown.keys()
        assert all(torch.equal(state.exported()[key], shown[key]) for key in shown)
        assert state.full_precision().keys() == full.keys()
        assert all(value.dtype == torch.float32 for value in full.values())
        fitted = state.fit(state.exported())
        before = {key: value.clone() for key, value in shown.items()}
        state.load(fitted)
        after = optimizer.slot_state(slot)
        assert all(torch.equal(after[key], value) for key, value in before.items())
