"""The state of one slot: its tensors, and how a saved state is checked and loaded.

Every optimizer of a stack returns a :class:`SlotState` for each slot, by ``state_of``. An executor
keeps the tensors (:class:`StateStore`). A precision wrapper adds the main param and a
:class:`StateLayout`, which shows the state as DTensors or as a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.setting_checks import check_setting, whole
from mp_optim.core.identity import Slot
from mp_optim.core.shown_copies import Coded
from mp_optim.core.tensors import local_tensor
from mp_optim.host.host_memory import same_values

STEP = "step"
"""The number of steps."""

MASTER = "master_param"
"""The FP32 main param."""

REMAINDER = "remainder"
"""The lower bits of a main param whose upper ones are the bfloat16 parameter."""

SECOND, MOMENT2 = "exp_avg_sq", "moment2_buffer"
"""The second moment: of elements, and of the rows of what Muon orthogonalises."""

AVERAGE = "averaged_param"
"""The moving average of the main param."""

SCALE = "_scale"


def scale_key(key: str) -> str:
    """Key of the scales of a moment that is stored in blocks."""
    return f"{key}{SCALE}"


def is_scale(key: str) -> bool:
    """Whether this is the key of some moment's scales."""
    return key.endswith(SCALE)


State = dict[str, Any]
"""A slot's state by key: tensors, and what else a saved one may hold."""


def without_keys(state: State, keys: Iterable[str]) -> State:
    """Return a state without some keys."""
    gone = set(keys)
    return {key: value for key, value in state.items() if key not in gone}


def local_state(state: State) -> State:
    """Return a state with the local part of each DTensor."""
    return {
        key: local_tensor(value) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def _ignore_write() -> None:
    """Do nothing after a write to the model's parameter."""


@dataclass(frozen=True)
class StateLayout:
    """How callers see the state that this rank keeps of one parameter.

    Attributes:
        show: returns kept state in the callers' layout: DTensors, or parts of a whole parameter.
        take: returns shown or saved state as this rank keeps it; its argument stays unchanged.
        is_as_stored: whether state is shown as it is stored: in blocks, and of any shape.
        is_whole: whether a checksum of the whole parameter is a checksum of this rank's part.
        refusal: reason why no saved state is taken; empty if some is.
        written: called when the model's parameter took another value.
    """

    show: Callable[[State], State] = dict
    take: Callable[[State], State] = dict
    is_as_stored: bool = True
    is_whole: bool = True
    refusal: str = ""
    written: Callable[[], None] = _ignore_write


class StateStore:
    """The state that an executor keeps, in the form that it steps. Each method is about one slot.
    This class keeps nothing: the store of a parameter that was never trained.

    Attributes:
        allocates_late: True if a slot has no state before its first step.
    """

    allocates_late = True

    def live_state(self, slot: Slot) -> State:
        """Return the live tensors as they are stored; allocate them unless ``allocates_late``."""
        return {}

    def unpacked_state(self, slot: Slot) -> State:
        """Return the live tensors, and FP32 copies of the parameter's shape for 4-bit codes."""
        return self.live_state(slot)

    def full_state(self, slot: Slot) -> State:
        """Return the state in FP32, copied where it is stored in fewer bits."""
        return self.live_state(slot)

    def coded_state(self, slot: Slot) -> dict[str, Coded]:
        """Return the state that is stored in blocks, by key."""
        return {}

    def has_no_fp32_main(self, slot: Slot) -> bool:
        """Whether the 16 bits that are stepped are all there is of a main param."""
        return False

    def fit_state(self, slot: Slot, saved: State, convert: bool) -> State:
        """Return a saved state in the form that :meth:`load_state` takes; write nothing.

        Raises:
            ValueError: bits would be lost, and ``convert`` is false.
        """
        return saved

    def check_fitted(self, slot: Slot, state: State) -> None:
        """Raise ValueError if a fitted state lacks a key, or has an unknown or mis-shaped one."""

    def check_values(self, slot: Slot, key: str, values: Tensor) -> None:
        """Raise ValueError if the state under a key cannot have these values."""

    def load_state(self, slot: Slot, state: State) -> None:
        """Copy a fitted state into the slot."""

    def reset_state(self, slot: Slot) -> None:
        """Give the slot the state it had before the first step; the main param keeps its value."""


@dataclass(frozen=True, eq=False)
class SlotState:
    """One slot's state as one layer shows it.

    Attributes:
        store: keeps the state. slot: the key there.
        name: FQN of the slot, for messages.
        main: the live main param, shown as ``master_param``; None if the state is all there is.
        missing: the message if a saved state has no main param.
        layout: how callers see this state.
    """

    store: StateStore
    slot: Slot
    name: str
    main: Tensor | None = None
    missing: str = ""
    layout: StateLayout = StateLayout()

    def live(self) -> State:
        """Return the live tensors as they are stored. Exported ones may be views of them."""
        return self._with_main(self.store.live_state(self.slot))

    def exported(self, *, in_blocks: bool = True) -> State:
        """Return the state as it leaves the optimizer, in the layout: live tensors, and FP32 copies
        of 4-bit codes.

        Args:
            in_blocks: False for FP32 copies of all state that is stored in blocks. A layout that
                cuts the parameter shows none: blocks are cut from this rank's part.
        """
        if in_blocks and self.layout.is_as_stored:
            state = self.store.unpacked_state(self.slot)
        else:
            state = self._without_blocks()
        return self.layout.show(self._with_main(state))

    def full_precision(self) -> State:
        """Return the state in FP32, in the layout, copied where it is stored in fewer bits."""
        state = self.store.full_state(self.slot)
        if self.main is not None:
            state = {**state, MASTER: self.main.float()}
        return self.layout.show(state)

    def coded(self) -> dict[str, Coded]:
        """Return the state that is stored in blocks, by key. A layout without scales shows FP32
        copies of it, and a value that is loaded for it may be refused."""
        return self.store.coded_state(self.slot)

    def _with_main(self, state: State) -> State:
        return dict(state) if self.main is None else {**state, MASTER: self.main}

    def _without_blocks(self) -> State:
        state = self.store.live_state(self.slot)
        if not any(map(is_scale, state)):
            return state
        full = self.store.full_state(self.slot)
        return {
            key: full[key] if scale_key(key) in state else value
            for key, value in state.items()
            if not is_scale(key)
        }

    def is_required(self) -> bool:
        """Whether saved state without any for this slot is incomplete."""
        return self.main is not None or not self.store.allocates_late

    def is_unallocated(self) -> bool:
        """Whether nothing is allocated yet, so that any saved state is taken as it is. False for a
        DTensor: it is not known how a tensor of another shape is split."""
        return self.layout.is_as_stored and not self.store.live_state(self.slot)

    # -- loading: fit, which checks, then load ----------------------------------------------------

    def fit(
        self,
        saved: State,
        convert: bool = False,
        checksum: int | None = None,
        weights: Tensor | None = None,
    ) -> State:
        """Return a saved state in the form that :meth:`load` takes; write nothing.

        Args:
            convert: also if that loses bits.
            checksum: of the parameter that the state was saved with, if it has to be loaded with
                that parameter.
            weights: values that the parameter will have then; by default the present ones.

        Raises:
            ValueError: a key is missing or unknown, a value does not fit, or bits would be lost.
        """
        if saved and self.layout.refusal:
            if not convert:
                raise ValueError(self.layout.refusal)
            saved = {}
        state = self.layout.take(saved)
        main = None if self.main is None else state.pop(MASTER, None)
        fitted = self.store.fit_state(self.slot, state, convert)
        if self.main is None:
            self.store.check_fitted(self.slot, fitted)
            return fitted
        if main is None:
            raise ValueError(self.missing)
        value = _as_lone(self.name, as_master(self.name, main, convert), self.main, convert)
        check_fits(f"{self.name}.{MASTER}", self.main, value)
        if AVERAGE in fitted and AVERAGE not in state:  # it starts from the main param
            fitted = {**fitted, AVERAGE: value.to(fitted[AVERAGE].dtype)}
        self.store.check_fitted(self.slot, fitted)
        return {**fitted, MASTER: value}

    def check_values(self, key: str, values: Tensor) -> None:
        """Raise ValueError if the state under a key cannot have these values."""
        self.store.check_values(self.slot, key, values)

    def load(self, state: State) -> None:
        """Copy a state that :meth:`fit` returned into the slot."""
        rest = state if self.main is None else without_keys(state, [MASTER])
        self.store.load_state(self.slot, rest)
        if self.main is not None:
            self.main.copy_(state[MASTER])

    def finish_load(self, saved: State, checksum: int | None) -> bool:
        """Give the model's parameter the value of the main param that was loaded, after all slots
        were; return whether it had another.

        Args:
            saved, checksum: as for :meth:`fit`.
        """
        return False

    def reset(self) -> None:
        """Give the slot the state it had before the first step; the main param keeps its value."""
        self.store.reset_state(self.slot)


# -- checks ---------------------------------------------------------------------------------------

_STEPS = whole(0, 2**24)
"""What an FP32 counter counts to."""


def check_state(name: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the slot, unless every live tensor can take a saved one, and none is
    left over."""
    if missing_or_unknown := live.keys() ^ saved.keys():
        missing = sorted(missing_or_unknown & live.keys())
        unknown = sorted(missing_or_unknown & saved.keys())
        raise ValueError(
            f"state of {name}: missing {missing}, unknown {unknown}; this optimizer keeps "
            f"{sorted(live)}. Was the state saved by another optimizer?"
        )
    for key, tensor in live.items():
        if key == "step":
            check_step(name, saved[key])
        else:
            check_fits(f"{name}.{key}", tensor, saved[key])


def check_step(name: str, value: Any) -> None:
    """Raise ValueError unless this is a number of steps."""
    if isinstance(value, Tensor) and value.dim():
        raise ValueError(f"{name}.step: saved shape {tuple(value.shape)}, expected ()")
    check_setting(f"{name}.step", value, _STEPS)


def check_fits(label: str, live: Tensor, saved: Any) -> None:
    """Raise ValueError unless ``saved`` can be copied into ``live`` without losing anything."""
    if not isinstance(saved, Tensor) or saved.is_meta:
        kind = "meta tensor" if isinstance(saved, Tensor) else type(saved).__name__
        raise ValueError(
            f"{label}: saved as a {kind}, expected a tensor of shape {tuple(live.shape)}"
        )
    if saved.shape != live.shape:
        raise ValueError(f"{label}: saved shape {tuple(saved.shape)}, expected {tuple(live.shape)}")
    alike = live.is_floating_point() == saved.is_floating_point()
    if (
        not alike
        or saved.is_complex()
        or torch.promote_types(saved.dtype, live.dtype) != live.dtype
    ):
        raise ValueError(
            f"{label}: saved as {saved.dtype}, which {live.dtype} cannot hold without loss; "
            f"convert it explicitly, or configure this state as {saved.dtype}"
        )


def as_master(label: str, saved: Any, convert: bool) -> Tensor:
    """A saved main param in FP32.

    Raises:
        ValueError: it is none, or would lose bits and ``convert`` is false.
    """
    has_values = isinstance(saved, Tensor) and not (saved.is_complex() or saved.is_meta)
    narrow = has_values and saved.is_floating_point() and saved.dtype != torch.float64
    if not (narrow or (has_values and convert)):
        shape = getattr(saved, "shape", torch.Size())
        form = torch.empty(shape, dtype=torch.float32, device="meta")
        check_fits(f"{label}.{MASTER}", form, saved)
    value: Tensor = saved.float()
    return value


def _as_lone(label: str, value: Tensor, main: Tensor, convert: bool) -> Tensor:
    """An FP32 main param in the dtype of the live one, which may have 16 bits.

    Raises:
        ValueError: it would lose bits, and ``convert`` is false.
    """
    narrow = value.to(main.dtype)
    if narrow.dtype != value.dtype and not convert and not same_values(narrow.float(), value):
        raise ValueError(
            f"{label}.{MASTER}: saved with more bits than a parameter of {main.dtype} holds, which "
            "is all that is kept here; load with convert=True, or keep main params"
        )
    return narrow
