"""The state of one slot: what is in it, and how a saved one is checked and loaded.

Every optimizer of a stack gives a :class:`SlotState` for each slot, and does so by one method. The
executor that steps the slot keeps the tensors. A precision wrapper puts one object around them
(``ParamState``), which shows them next to the main param, in a :class:`StateLayout`: as DTensors or
as a shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.setting_checks import check_setting, whole
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


class SlotState(ABC):
    """One slot's state as one layer shows it. Made for one use: the optimizer gives another when it
    is asked again.

    Attributes:
        layout: how callers see this state.
    """

    layout = StateLayout()

    @abstractmethod
    def tensors(self) -> State:
        """The live tensors, allocated if they did not exist; copies
        only of what a wrapper shows otherwise: 4-bit codes, and codes of a DTensor's part."""

    def shown(self) -> State:
        """The state as it leaves the optimizer: the live tensors, and 4-bit codes as FP32 copies of
        the parameter's shape."""
        return self.tensors()

    def kept(self) -> State:
        """The very tensors that are kept, as they are stored: what is shown may be views of
        these."""
        return self.tensors()

    def full_precision(self) -> State:
        """The state with everything in FP32, copied where it is stored in fewer bits."""
        return self.tensors()

    def is_required(self) -> bool:
        """Whether a saved state without any for this slot is incomplete."""
        return bool(self.tensors())

    def takes_any(self) -> bool:
        """Whether nothing is allocated yet, and whatever was saved would be taken as it is."""
        return False

    def coded(self) -> dict[str, Coded]:
        """Return the state that is stored in blocks, by key. A layer that shows no scales for a key
        shows an FP32 copy, and a value that is loaded for it may be refused."""
        return {}

    def is_lone(self) -> bool:
        """Whether what is stepped are 16 bits that are all there is of a main param."""
        return False

    # -- loading: fit, check, then load -----------------------------------------------------------

    def fit(self, saved: State, convert: bool) -> State:
        """A saved state in the form that :meth:`load` takes; writes nothing.

        Raises:
            ValueError: bits would be lost, and ``convert`` is false.
        """
        return saved

    @abstractmethod
    def check(self, state: State) -> None:
        """Raise ValueError if a fitted state lacks a key, or has an unknown or mis-shaped one;
        writes nothing."""

    def check_values(self, key: str, values: Tensor) -> None:  # noqa: B027
        """Raise ValueError if this may not be some of what is saved under a key; :meth:`check` does
        so for all."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Copy a fitted state into the slot.

        Raises:
            ValueError: as :meth:`check`.
        """

    @abstractmethod
    def reset(self) -> None:
        """Begin again, as before the first step; the main param keeps its value."""

    def check_weights(  # noqa: B027
        self, saved: State, checksum: int | None, weights: Tensor | None = None
    ) -> None:
        """Raise ValueError if a saved state has to be loaded beside the parameter it was saved
        with, which had this checksum, and another parameter is there.

        Args:
            weights: that the parameter will have then; by default those it has.
        """

    def expect_weights(self, saved: State, checksum: int | None) -> None:  # noqa: B027
        """A saved state was loaded that belongs to a parameter of this checksum."""

    def write_model(self) -> bool:
        """Give the model's parameter the value of the main param that was loaded; returns whether
        it had another."""
        return False


def without_blocks(state: SlotState) -> State:
    """A slot's tensors, with moments that are stored in blocks in FP32. Blocks are cut from this
    rank's part, so no other layout could read them."""
    tensors = state.tensors()
    if not any(map(is_scale, tensors)):
        return tensors
    full = state.full_precision()
    return {
        key: full[key] if scale_key(key) in tensors else value
        for key, value in tensors.items()
        if not is_scale(key)
    }


# -- checks ---------------------------------------------------------------------------------------

_STEPS = whole(0, 2**24, "must be a whole number in [0, 2**24]")
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


# -- beside the main param of a parameter of fewer bits -------------------------------------------


class WithMainParam(SlotState):
    """The state that an executor keeps and, under ``master_param``, the main param.

    Args:
        below: what the executor keeps.
        name: of the slot, for messages.
        main: the live main param; None if nothing is shown beside the state.
        missing: what to say of a saved state that has no main param.
    """

    def __init__(self, below: SlotState, name: str, main: Tensor | None, missing: str) -> None:
        self.below, self.name = below, name
        self._main, self._missing = main, missing

    def _beside_main(self, state: State) -> State:
        return state if self._main is None else {**state, MASTER: self._main}

    def tensors(self) -> State:
        return self.kept()

    def kept(self) -> State:
        return self._beside_main(self.below.kept())

    def shown(self) -> State:
        return self._beside_main(self.below.shown())

    def full_precision(self) -> State:
        full = self._beside_main(self.below.full_precision())
        return {key: value.float() if key == MASTER else value for key, value in full.items()}

    def is_required(self) -> bool:
        return self._main is not None or self.below.is_required()

    def takes_any(self) -> bool:
        return self.below.takes_any()

    def coded(self) -> dict[str, Coded]:
        return self.below.coded()

    def fit(self, saved: State, convert: bool) -> State:
        if self._main is None:
            return self.below.fit(saved, convert)
        rest, main = _split(saved)
        fitted = self.below.fit(rest, convert)
        if main is None:
            return fitted
        value = _as_lone(self.name, as_master(self.name, main, convert), self._main, convert)
        if AVERAGE in fitted and AVERAGE not in saved:  # it starts from the main param
            fitted = {**fitted, AVERAGE: value.to(fitted[AVERAGE].dtype)}
        return {**fitted, MASTER: value}

    def check(self, state: State) -> None:
        rest = state
        if self._main is not None:
            if MASTER not in state:
                raise ValueError(self._missing)
            rest, main = _split(state)
            check_fits(f"{self.name}.{MASTER}", self._main, main)
        self.below.check(rest)

    def check_values(self, key: str, values: Tensor) -> None:
        self.below.check_values(key, values)

    def load(self, state: State) -> None:
        if self._main is None:
            self.below.load(state)
            return
        rest, main = _split(state)
        self.below.load(rest)
        if main is not None:
            self._main.copy_(main)

    def reset(self) -> None:
        self.below.reset()


def _split(state: State) -> tuple[State, Any]:
    """A state without its main param, and that."""
    rest = dict(state)
    main = rest.pop(MASTER, None)
    return rest, local_tensor(main) if isinstance(main, Tensor) else main
