"""How a precision wrapper shows the state of a model's parameter: in the parameter's layout, beside
its main param, and only beside the weights it was saved with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.checkpoint.shards import is_cut
from mp_optim.config.rules import is_elementwise
from mp_optim.process.leases import before_writing
from mp_optim.quantized import holds, is_quantized, quantize_
from mp_optim.slots import Slot, local_tensor
from mp_optim.slots.slot_state import MASTER, REMAINDER, LayeredState, SlotState, State
from mp_optim.slots.state_dict import names_in_words
from mp_optim.update.codecs import split_
from mp_optim.update.measures import checksums_of
from mp_optim.update.state_format import WithMainParam, joined, unpacked


def as_sharded(local: Tensor, param: Tensor, key: str = "") -> Tensor:
    """State of a DTensor parameter as a DTensor of the same layout; scalars, what every rank keeps
    whole and that of plain parameters unchanged.

    Args:
        key: of the state; empty for a main param.
    """
    if (
        not isinstance(param, DTensor)
        or not is_elementwise(key)
        or not isinstance(local, Tensor)
        or (local.dim() == 0 and param.dim() > 0)
    ):
        return local
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def as_local_state(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`as_sharded` for a slot's whole state; never modifies its argument."""
    return {
        key: local_tensor(value) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one device hold equal numbers, nan among them."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def stands_for(main: Tensor, param: Tensor) -> bool:
    """Whether a parameter is its FP32 main param, rounded: to nearest even; or with halves away
    from zero, as it is beside a remainder."""
    if same_values(main.to(device=param.device, dtype=param.dtype), param):
        return True
    if param.dtype != torch.bfloat16 or main.dtype != torch.float32:
        return False
    away = torch.empty_like(param, memory_format=torch.contiguous_format)
    split_(main.to(param.device), away, torch.empty_like(away, dtype=torch.int16))
    return bool(
        ((away == param) | (main.to(param) == param) | (away.isnan() & param.isnan())).all()
    )


class Agreement:
    """What is not yet certain about loaded slots.

    Attributes:
        expected: checksums of the parameters that the remainders of these slots belong to.
        written: slots whose parameter took another value when their main param was loaded.
    """

    def __init__(self) -> None:
        self.expected: dict[Slot, int] = {}
        self.written: set[Slot] = set()

    def forget(self, slot: Slot) -> None:
        """The slot was loaded anew."""
        self.expected.pop(slot, None)
        self.written.discard(slot)

    def check_expected(
        self, slot: Slot | None, param_of: Callable[[Slot], Tensor], name_of: Callable[[Slot], str]
    ) -> None:
        """Raise unless what is expected of a slot, or of all, is so; what was found so once is not
        asked again.

        Raises:
            ValueError: naming the parameters that have other values.
        """
        some = {slot: self.expected[slot]} if slot in self.expected else {}
        chosen = self.expected if slot is None else some
        self.check(chosen.items(), param_of, name_of)
        for proven in list(chosen):
            del self.expected[proven]

    @staticmethod
    def check(
        expected: Iterable[tuple[Slot, int]],
        param_of: Callable[[Slot], Tensor],
        name_of: Callable[[Slot], str],
    ) -> None:
        """Raise unless parameters have the checksums they are expected to have.

        Raises:
            ValueError: naming those that have not.
        """
        pairs = list(expected)
        sums = checksums_of([param_of(slot) for slot, _ in pairs])
        others = [
            name_of(slot)
            for (slot, wanted), checksum in zip(pairs, sums, strict=True)
            if checksum != wanted
        ]
        if others:
            raise ValueError(
                f"{len(others)} parameters are not the ones that their loaded remainders belong "
                f"to: {names_in_words(others)}. Load the model's weights that were saved with this "
                "state, all of them; or, to go on from the weights that are there, without the "
                "extra bits, load with convert=True or call reload_model_params()"
            )


@dataclass(frozen=True)
class BoundParam:
    """A parameter of the model, and what is stepped for it.

    Attributes:
        slot, name: which.
        param: the model's. stepped: the tensor in the wrapped optimizer's groups.
        is_separate: whether they are two tensors.
        main_param: the FP32 value of what is stepped.
    """

    slot: Slot
    name: str
    param: Tensor
    stepped: Tensor
    is_separate: bool
    main_param: Callable[[], Tensor]

    @property
    def local(self) -> Tensor:
        """What this rank has of the model's parameter."""
        return local_tensor(self.param)

    @property
    def has_master(self) -> bool:
        """Whether a parameter of fewer bits is stepped on an FP32 tensor; else it is FP32 itself,
        or has a remainder."""
        return (
            self.is_separate
            and self.param.dtype != torch.float32
            and self.stepped.dtype == torch.float32
        )


class UntrainedState(SlotState):
    """Of a parameter that has never been trainable here: it costs nothing. Saved state, from a run
    that froze it later, makes it one that has been.

    Args:
        prepared: gives it a main param, which nothing shows yet; returns its state as that of one
            that is trained.
        take: makes it one that is.
    """

    def __init__(self, prepared: Callable[[], SlotState], take: Callable[[], None]) -> None:
        self._prepared, self._take = prepared, take

    @cached_property
    def _trained(self) -> SlotState:
        return self._prepared()

    def tensors(self) -> State:
        return {}

    def takes_any(self) -> bool:
        return True

    def fit(self, saved: State, convert: bool) -> State:
        return self._trained.fit(saved, convert) if saved else saved

    def check(self, state: State) -> None:
        if state:
            self._trained.check(state)

    def check_values(self, key: str, values: Tensor) -> None:
        self._trained.check_values(key, values)

    def check_weights(
        self, saved: State, checksum: int | None, weights: Tensor | None = None
    ) -> None:
        if saved:
            self._trained.check_weights(saved, checksum, weights)

    def load(self, state: State) -> None:
        if state:
            self._take()
            self._trained.load(state)


class ParamState(LayeredState):
    """Of a parameter that is trained.

    Args:
        stored: the state in the wrapped optimizer.
        agreement: what is not yet certain about loaded slots.
    """

    def __init__(self, stored: SlotState, bound: BoundParam, agreement: Agreement) -> None:
        self._stored, self._bound, self._agreement = stored, bound, agreement
        missing = (
            f"state of {bound.name}: master_param is missing, so its full-precision value is lost; "
            "to start from the model's values, add them under that key, or load what torch.optim "
            "saved by mp_optim.checkpoint.foreign.import_state(optimizer, "
            "from_torch(state_dict, names), main_from_model=True)"
        )
        if bound.has_master:
            stored = WithMainParam(stored, bound.name, bound.stepped, missing)
        super().__init__(stored)

    def tensors(self) -> State:
        if isinstance(self._bound.param, DTensor):
            return self._in_layout(self.without_blocks())
        return self._in_layout(unpacked(self.below.tensors(), self._bound.stepped))

    def takes_any(self) -> bool:
        """Not of a DTensor: how a tensor of another shape is split is not known."""
        return not isinstance(self._bound.param, DTensor) and self.below.takes_any()

    def full_precision(self) -> State:
        return self._in_layout(self.below.full_precision())

    def _in_layout(self, state: State) -> State:
        return {key: as_sharded(value, self._bound.param, key) for key, value in state.items()}

    def fit(self, saved: State, convert: bool) -> State:
        bound, state = self._bound, as_local_state(saved)
        if REMAINDER in state and bound.has_master:
            state[MASTER] = joined(bound.name, bound.local, state.pop(REMAINDER))
        return self.below.fit(state, convert)

    def check(self, state: State) -> None:
        self._check_dtype(state)
        self.below.check(as_local_state(state))

    def _check_dtype(self, saved: State) -> None:
        """Raise ValueError if an FP32 parameter is here that had fewer bits when it was saved."""
        if self._bound.param.dtype != torch.float32:
            return
        was = {REMAINDER: "bfloat16", MASTER: "of 16 or 8 bits"}
        for key, dtype in was.items():
            if key in saved:
                raise ValueError(
                    f"state of {self._bound.name}: the parameter was {dtype} when it was saved (it "
                    f"has {key!r}), and is float32 here. Give it the dtype it had before the "
                    "optimizer is built or loaded; what loads weights may have changed it (peft's "
                    "load_adapter makes adapters float32 unless autocast_adapter_dtype=False)"
                )

    def load(self, state: State) -> None:
        bound, state = self._bound, as_local_state(state)
        self._agreement.forget(bound.slot)
        becomes_remainder = MASTER in state and not bound.has_master
        if becomes_remainder and not stands_for(state[MASTER], bound.local):
            self._agreement.written.add(bound.slot)  # as soon as parameter and remainder are split
        self.below.load(state)

    # -- remainders belong to the parameters they were saved with ---------------------------------

    def has_remainder(self) -> bool:
        """Whether the main param is the parameter and a remainder."""
        return self._bound.stepped.dtype == torch.bfloat16 and REMAINDER in self._stored.tensors()

    def check_weights(
        self, saved: State, checksum: int | None, weights: Tensor | None = None
    ) -> None:
        if checksum is None or REMAINDER not in saved or is_cut(self._bound.param):
            return  # a checksum is of the whole parameter
        if REMAINDER in self._stored.tensors():
            return  # its weights may be loaded later
        self._check_dtype(saved)
        slot, name = self._bound.slot, self._bound.name
        beside = self._bound.local if weights is None else weights
        self._agreement.check([(slot, checksum)], lambda _: beside, lambda _: name)

    def expect_weights(self, saved: State, checksum: int | None) -> None:
        if checksum is None or REMAINDER not in saved or is_cut(self._bound.param):
            return
        if REMAINDER not in self._stored.tensors():
            return
        if checksums_of([self._bound.local]) != [checksum]:  # its weights are yet to come
            self._agreement.expected[self._bound.slot] = checksum

    # -- the model's parameter --------------------------------------------------------------------

    @torch.no_grad()
    def write_model(self) -> bool:
        bound = self._bound
        noted = bound.slot in self._agreement.written
        self._agreement.written.discard(bound.slot)
        if not bound.is_separate or bound.param.dtype == torch.float32:
            return noted  # it is stepped itself, or says all that its main param says
        if is_quantized(bound.param):
            return self._quantize()
        main, local = bound.stepped, bound.local
        # a bfloat16 main param was noted when it was split
        differs = main.dtype == torch.float32 and not stands_for(main, local)
        value = main.to(device=local.device, dtype=local.dtype)
        if not same_values(value, local):
            before_writing([local])
            local.copy_(value)
        return differs or noted

    def _quantize(self) -> bool:
        main = self._bound.main_param()
        differs = not holds(self._bound.param, main)
        if differs:
            quantize_(self._bound.param, main)
        return differs
