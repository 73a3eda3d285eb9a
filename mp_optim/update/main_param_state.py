"""State beside the FP32 main param that is stepped for a parameter of fewer bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mp_optim.process.leases import before_writing
from mp_optim.slots import local_tensor
from mp_optim.slots.slot_state import LayeredState, SlotState, State, check_fits
from mp_optim.slots.state_keys import AVERAGE, MASTER
from mp_optim.update.state_format import as_master


class WithMainParam(LayeredState):
    """The state of the layer below and, under ``master_param``, the main param.

    Args:
        name: of the slot, for messages.
        main: the live main param.
        missing: what to say of a saved state that has none.
    """

    def __init__(self, below: SlotState, name: str, main: Tensor, missing: str) -> None:
        super().__init__(below)
        self._name, self._main, self._missing = name, main, missing

    def tensors(self) -> State:
        return {**self.below.tensors(), MASTER: self._main}

    def shown(self) -> State:
        return {**self.below.shown(), MASTER: self._main}

    def full_precision(self) -> State:
        return {**self.below.full_precision(), MASTER: self._main}

    def is_required(self) -> bool:
        return True

    def fit(self, saved: State, convert: bool) -> State:
        rest, main = _split(saved)
        fitted = self.below.fit(rest, convert)
        if main is None:
            return fitted
        value = as_master(self._name, main, convert)
        if AVERAGE in fitted and AVERAGE not in saved:  # it starts from the main param
            fitted = {**fitted, AVERAGE: value.to(fitted[AVERAGE].dtype)}
        return {**fitted, MASTER: value}

    def check(self, state: State) -> None:
        if MASTER not in state:
            raise ValueError(self._missing)
        rest, main = _split(state)
        check_fits(f"{self._name}.{MASTER}", self._main, main)
        self.below.check(rest)

    def load(self, state: State) -> None:
        rest, main = _split(state)
        self.below.load(rest)
        if main is not None:
            before_writing([self._main])
            self._main.copy_(main)


def _split(state: State) -> tuple[State, Any]:
    """A state without its main param, and that."""
    rest = dict(state)
    main = rest.pop(MASTER, None)
    return rest, local_tensor(main) if isinstance(main, Tensor) else main
