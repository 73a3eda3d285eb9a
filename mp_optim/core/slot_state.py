"""The state of one slot: its tensors, its export, and the check and load of saved state.

``state_of(slot)`` of every optimizer of a stack returns a :class:`SlotState`. The executor keeps
the tensors in a :class:`StateStore`. A precision wrapper adds the main param and a
:class:`StateLayout`, which converts the state to DTensors or shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.setting_checks import check_setting, whole
from mp_optim.core.identity import Slot
from mp_optim.core.tensors import local_tensor
from mp_optim.host.host_memory import same_values

STEP = "step"
"""State key of the number of steps."""

MASTER = "master_param"
"""State key of the FP32 main param."""

REMAINDER = "remainder"
"""State key of the lower 16 bits of a main param whose upper 16 bits are the bfloat16 parameter."""

SECOND, MOMENT2 = "exp_avg_sq", "moment2_buffer"
"""State keys of second moments: one value for each element, or one value for each row of Muon's
orthogonalized updates."""

AVERAGE = "averaged_param"
"""State key of the moving average of the main param."""

SCALE = "_scale"


def scale_key(key: str) -> str:
    """Return the key of the scales of a moment that is stored in blocks."""
    return f"{key}{SCALE}"


def is_scale(key: str) -> bool:
    """True if this is the key of a moment's scales."""
    return key.endswith(SCALE)


State = dict[str, Any]
"""A slot's state by key: tensors. A saved state may also have other values."""


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


@dataclass(frozen=True, eq=False)
class Coded:
    """One state tensor that is stored in blocks.

    Attributes:
        stored: the codes.
        scale: FP32 scales, one per block.
        decode: returns the FP32 values of codes and scales, in the shape of the main param.
        encode: writes FP32 values of that shape, rounded, to codes and scales.
        check: raises ValueError if values cannot be stored.
    """

    stored: Tensor
    scale: Tensor
    decode: Callable[[Tensor, Tensor], Tensor]
    encode: Callable[[Tensor, Tensor, Tensor], None]
    check: Callable[[Tensor], None]

    def values(self) -> Tensor:
        """Return the FP32 values in new memory."""
        return self.decode(self.stored, self.scale)

    def rounded(self, values: Tensor) -> Tensor:
        """Return FP32 values after a round trip through codes and scales.

        Args:
            values: FP32, in the shape of the main param.

        Raises:
            ValueError: the values cannot be stored.
        """
        self.check(values)
        form = self.stored, self.scale
        stored, scale = (torch.empty_like(each, device=values.device) for each in form)
        self.encode(values, stored, scale)
        return self.decode(stored, scale)


@dataclass(frozen=True)
class StateLayout:
    """The conversion between the state that this rank stores for one parameter, and the layout that
    callers see.

    Attributes:
        show: converts stored state to the callers' layout: DTensors, or parts of a whole parameter.
        take: converts exported or saved state to the stored layout; does not change the argument.
        is_as_stored: False if blocks of codes do not fit the callers' layout, so that callers see
            FP32 copies of all state that is stored in blocks.
        is_whole: True if this rank has the whole parameter, so that a checksum of this rank's
            tensor is the parameter's.
        refusal: reason why saved state cannot be loaded; empty if it can be loaded.
        written: callback after the model's parameter took another value.
    """

    show: Callable[[State], State] = dict
    take: Callable[[State], State] = dict
    is_as_stored: bool = True
    is_whole: bool = True
    refusal: str = ""
    written: Callable[[], object] = lambda: None


class StateStore:
    """Base class of the stores in which executors keep state, in the dtypes that kernels step.
    Each method reads or writes the state of one slot.

    This class keeps no state. An instance serves as the store of a parameter that was never
    trained.

    Attributes:
        allocates_late: True if a slot has no state before its first step.
    """

    allocates_late = True

    def live_state(self, slot: Slot) -> State:
        """Return the live tensors as they are stored; allocate them unless ``allocates_late``."""
        return {}

    def unpacked_state(self, slot: Slot) -> State:
        """Return the live tensors, with FP32 copies of the parameter's shape in place of 4-bit
        codes."""
        return self.live_state(slot)

    def full_state(self, slot: Slot) -> State:
        """Return the state in FP32; tensors that are stored in fewer bits are copied."""
        return self.live_state(slot)

    def coded_state(self, slot: Slot) -> dict[str, Coded]:
        """Return the state that is stored as codes and scales of blocks, by key."""
        return {}

    def has_no_fp32_main(self, slot: Slot) -> bool:
        """True if the 16-bit parameter is stepped directly, without a main param or remainder."""
        return False

    def fit_state(self, slot: Slot, saved: State, convert: bool) -> State:
        """Return a saved state in the form that :meth:`load_state` takes; write nothing.

        Args:
            slot: the parameter.
            saved: the saved state by key.
            convert: True to allow a loss of bits.

        Raises:
            ValueError: bits would be lost, and ``convert`` is false.
        """
        return saved

    def check_fitted(self, slot: Slot, state: State) -> None:
        """Raise ValueError if a fitted state has a missing, unknown or misshapen tensor."""

    def check_values(self, slot: Slot, key: str, values: Tensor) -> None:
        """Raise ValueError if these values are not valid for the state key."""

    def load_state(self, slot: Slot, state: State) -> None:
        """Copy a fitted state into the slot."""

    def reset_state(self, slot: Slot) -> None:
        """Set the state of a slot to its values before the first step. The main param keeps its
        value."""


@dataclass(frozen=True, eq=False)
class SlotState:
    """The state of one slot, as one layer of the stack exports it.

    Attributes:
        store: the object that keeps the state.
        slot: key of the state in the store.
        name: FQN of the slot, for messages.
        main: the live main param, exported as ``master_param``; None without a separate main param.
        missing: error message for a saved state without a main param.
        layout: conversion to the callers' layout.
    """

    store: StateStore
    slot: Slot
    name: str
    main: Tensor | None = None
    missing: str = ""
    layout: StateLayout = StateLayout()

    def live(self) -> State:
        """Return the live tensors as they are stored. Exported tensors may be views of them."""
        return self._with_main(self.store.live_state(self.slot))

    def exported(self, *, in_blocks: bool = True) -> State:
        """Return the state in the callers' layout: live tensors, and FP32 copies of 4-bit codes.

        Args:
            in_blocks: False for FP32 copies of all state that is stored in blocks. A layout that
                splits the parameter always exports copies, because blocks of 256 elements start at
                this rank's first element.
        """
        if in_blocks and self.layout.is_as_stored:
            return self.layout.show(self._with_main(self.store.unpacked_state(self.slot)))
        state = self.store.live_state(self.slot)
        if coded := [key for key in state if scale_key(key) in state]:
            full = self.store.full_state(self.slot)
            state = without_keys(state, map(scale_key, coded)) | {key: full[key] for key in coded}
        return self.layout.show(self._with_main(state))

    def full_precision(self) -> State:
        """Return the state in FP32 and in the callers' layout. Tensors with fewer bits are
        copied."""
        state = self.store.full_state(self.slot)
        if self.main is not None:
            state = {**state, MASTER: self.main.float()}
        return self.layout.show(state)

    def coded(self) -> dict[str, Coded]:
        """Return the state that is stored as codes and scales of blocks, by key.

        A layout without scales exports this state as FP32 copies. A load may refuse the copies,
        because rounding them loses bits.
        """
        return self.store.coded_state(self.slot)

    def _with_main(self, state: State) -> State:
        return dict(state) if self.main is None else {**state, MASTER: self.main}

    def is_unallocated(self) -> bool:
        """True if no state is allocated yet, so that a saved state of any form can be loaded.

        Always False if :attr:`StateLayout.is_as_stored` is False, as for a DTensor: the split of a
        saved tensor of another shape than the parameter is not known.
        """
        return self.layout.is_as_stored and not self.store.live_state(self.slot)

    # -- loading: fit checks, load writes ---------------------------------------------------------

    def fit(
        self,
        saved: State,
        convert: bool = False,
        checksum: int | None = None,
        weights: Tensor | None = None,
    ) -> State:
        """Return a saved state in the form that :meth:`load` takes; write nothing.

        Args:
            saved: the saved state by key.
            convert: True to allow a loss of bits.
            checksum: checksum of the parameter at the save, if the state is valid only with that
                parameter; else None.
            weights: values that the parameter will have after the load; None for its present
                values.

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
        full = as_master(self.name, main, convert)
        # The main param has 16 bits if the parameter is stepped without an FP32 main param, so
        # round the saved value to the dtype of the main param.
        value = full.to(self.main.dtype)
        if value.dtype != full.dtype and not convert and not same_values(value.float(), full):
            raise ValueError(
                f"{self.name}.{MASTER}: saved with more bits than {value.dtype}, but this "
                "optimizer steps the parameter without an FP32 main param; load with "
                "convert=True, or configure FP32 main params"
            )
        check_fits(f"{self.name}.{MASTER}", self.main, value)
        # No average was saved, so the average starts from the main param.
        if AVERAGE in fitted and AVERAGE not in state:
            fitted = {**fitted, AVERAGE: value.to(fitted[AVERAGE].dtype)}
        self.store.check_fitted(self.slot, fitted)
        return {**fitted, MASTER: value}

    def check_values(self, key: str, values: Tensor) -> None:
        """Raise ValueError if these values are not valid for the state key."""
        self.store.check_values(self.slot, key, values)

    def load(self, state: State) -> None:
        """Copy a state that :meth:`fit` returned into the slot."""
        rest = state if self.main is None else without_keys(state, [MASTER])
        self.store.load_state(self.slot, rest)
        if self.main is not None:
            self.main.copy_(state[MASTER])

    def finish_load(self, saved: State, checksum: int | None) -> bool:
        """Round the loaded main param into the model's parameter, after all slots were loaded.

        Args:
            saved: the saved state, the argument of :meth:`fit`.
            checksum: checksum of the parameter at the save, or None.

        Returns:
            True if the parameter had another value.
        """
        return False


# -- checks ---------------------------------------------------------------------------------------

_STEPS = whole(0, 2**24)
"""Check of a step count. FP32 counters are exact up to 2^24."""


def check_state(name: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless saved and live state have the same keys, and each saved tensor fits.

    Args:
        name: FQN of the slot, for messages.
        live: the live state by key.
        saved: the saved state by key.
    """
    if missing_or_unknown := live.keys() ^ saved.keys():
        missing = sorted(missing_or_unknown & live.keys())
        unknown = sorted(missing_or_unknown & saved.keys())
        raise ValueError(
            f"state of {name}: missing {missing}, unknown {unknown}; this optimizer keeps "
            f"{sorted(live)}. Load state that the same optimizer saved"
        )
    for key, tensor in live.items():
        if key == "step":
            check_step(name, saved[key])
        else:
            check_fits(f"{name}.{key}", tensor, saved[key])


def check_step(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a number of steps: a whole number from 0 to 2**24.

    Args:
        name: FQN of the slot, for messages.
        value: a number, or a tensor of one element.
    """
    if isinstance(value, Tensor) and value.dim():
        raise ValueError(
            f"{name}.step: saved shape {tuple(value.shape)}, expected (); load one number of steps"
        )
    check_setting(f"{name}.step", value, _STEPS)


def check_fits(label: str, live: Tensor, saved: Any) -> None:
    """Raise ValueError unless a saved tensor can be copied into a live one without a loss of bits.

    Args:
        label: name of the state, for messages.
        live: the live tensor.
        saved: the saved value.
    """
    if not isinstance(saved, Tensor) or saved.is_meta:
        kind = "meta tensor" if isinstance(saved, Tensor) else type(saved).__name__
        raise ValueError(
            f"{label}: saved as a {kind}, expected a tensor of shape {tuple(live.shape)}; load "
            "state that the same optimizer saved"
        )
    if saved.shape != live.shape:
        raise ValueError(
            f"{label}: saved shape {tuple(saved.shape)}, expected {tuple(live.shape)}; load state "
            "of the same model"
        )
    alike = live.is_floating_point() == saved.is_floating_point()
    if (
        not alike
        or saved.is_complex()
        or torch.promote_types(saved.dtype, live.dtype) != live.dtype
    ):
        raise ValueError(
            f"{label}: saved as {saved.dtype}, which {live.dtype} cannot hold without loss; "
            f"convert the saved tensor explicitly, or configure this state as {saved.dtype}"
        )


def as_master(label: str, saved: Any, convert: bool) -> Tensor:
    """Return a saved main param in FP32.

    Args:
        label: FQN of the slot, for messages.
        saved: the saved value.
        convert: True to allow a loss of bits.

    Raises:
        ValueError: the value is not a floating tensor, or bits would be lost.
    """
    has_values = isinstance(saved, Tensor) and not (saved.is_complex() or saved.is_meta)
    narrow = has_values and saved.is_floating_point() and saved.dtype != torch.float64
    if not (narrow or (has_values and convert)):
        shape = getattr(saved, "shape", torch.Size())
        form = torch.empty(shape, dtype=torch.float32, device="meta")
        check_fits(f"{label}.{MASTER}", form, saved)
    value: Tensor = saved.float()
    return value
