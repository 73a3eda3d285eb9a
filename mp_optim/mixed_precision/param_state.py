"""The state of a model's parameter, as a precision wrapper exports and loads it: with the main
param, and in the parameter's layout. A remainder is loaded only with the weights of its save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mp_optim.config.rules import moment_of
from mp_optim.core import Slot, local_tensor
from mp_optim.core.executor import Executor
from mp_optim.core.flat_shard import is_cut
from mp_optim.core.names import names_in_words
from mp_optim.core.quantized import holds, is_quantized, quantize_
from mp_optim.core.slot_state import MASTER, REMAINDER, SlotState, State, StateLayout, local_state
from mp_optim.host.host_memory import same_values
from mp_optim.host.torch_types import is_dtensor
from mp_optim.kernels.checksums import checksums_of
from mp_optim.kernels.codecs import split_
from mp_optim.kernels.state_format import joined


def as_sharded(local: Tensor, param: Tensor, key: str = "") -> Tensor:
    """Return a state tensor of a DTensor parameter as a DTensor that shares its memory.

    The tensor is returned unchanged if the parameter is no DTensor, if the tensor has another shape
    than this rank's part, or if every rank has the whole state.

    Args:
        local: the state tensor on this rank.
        param: the model's parameter.
        key: state key of the tensor; empty for a main param.
    """
    if (
        not is_dtensor(param)
        or not moment_of(key).elementwise
        or not isinstance(local, Tensor)
        or local.shape != local_tensor(param).shape
    ):
        return local
    from torch.distributed.tensor import DTensor

    # DTensor.from_local() would move the tensor to the device of the mesh, so call the constructor.
    if local.device.type != param.device_mesh.device_type:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(param.shape, param.stride(), local.dtype)
        spec = DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta)
        return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def stands_for(main: Tensor, param: Tensor) -> bool:
    """True if a parameter is its FP32 main param, rounded to nearest even. A bfloat16 parameter may
    also be rounded to nearest with ties away from zero, as a step with remainders rounds."""
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
    """Loaded slots whose state is not yet compared with the model's weights.

    Attributes:
        expected: for each slot with a loaded remainder, the checksum of the parameter at the save
            of the remainder.
        written: slots whose parameter changed when the main param was loaded.
    """

    def __init__(self) -> None:
        self.expected: dict[Slot, int] = {}
        self.written: set[Slot] = set()


def check_weights(
    checksums: Mapping[Slot, int],
    param_of: Callable[[Slot], Tensor],
    name_of: Callable[[Slot], str],
) -> None:
    """Raise ValueError unless parameters have the checksums with which remainders were saved.

    Args:
        checksums: the checksum of the parameter at each slot.
        param_of: function that returns the local parameter of a slot.
        name_of: function that returns the FQN of a slot.

    Raises:
        ValueError: parameters have other values; the message has their names.
    """
    present = checksums_of(list(map(param_of, checksums)))
    wanted = zip(checksums.items(), present, strict=True)
    others = [name_of(slot) for (slot, checksum), now in wanted if now != checksum]
    if others:
        raise ValueError(
            f"{len(others)} parameters differ from those with which their remainders were saved: "
            f"{names_in_words(others)}. Load all model weights that were saved with this state. To "
            "continue from the current weights without the extra bits, load with convert=True or "
            "call reload_model_params()"
        )


def state_layout_of(param: Tensor) -> StateLayout:
    """Return the layout in which the state of a parameter is exported: DTensors for a DTensor, else
    as stored."""
    return StateLayout(
        show=lambda state: {key: as_sharded(value, param, key) for key, value in state.items()},
        take=local_state,
        is_as_stored=not is_dtensor(param),
        is_whole=not is_cut(param),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class UntrainedState(SlotState):
    """State of a parameter that has never been trainable. It takes no memory. Loading the state of
    a run that trained the parameter makes the parameter trainable.

    Attributes:
        prepared: function that makes a main param, which the table does not record yet, and returns
            the state of a trained parameter.
        take: function that makes the parameter trainable.
    """

    prepared: Callable[[], ParamState]
    take: Callable[[], None]

    def is_unallocated(self) -> bool:
        return not self.layout.refusal

    def fit(
        self,
        saved: State,
        convert: bool = False,
        checksum: int | None = None,
        weights: Tensor | None = None,
    ) -> State:
        if saved and not self.layout.refusal:
            return self.prepared().fit(saved, convert, checksum, weights)
        return super().fit(saved, convert)

    def check_values(self, key: str, values: Tensor) -> None:
        self.prepared().check_values(key, values)

    def load(self, state: State) -> None:
        if state:
            trained = self.prepared()
            self.take()
            trained.load(state)


@dataclass(frozen=True, eq=False, kw_only=True)
class ParamState(SlotState):
    """State of a trained parameter, in the layout that callers see."""

    executor: Executor
    param: Tensor
    has_own_main: bool
    agreement: Agreement

    @property
    def _local(self) -> Tensor:
        return local_tensor(self.param)

    def fit(
        self,
        saved: State,
        convert: bool = False,
        checksum: int | None = None,
        weights: Tensor | None = None,
    ) -> State:
        if not saved or self.layout.refusal:
            return super().fit(saved, convert)
        was = {REMAINDER: "bfloat16", MASTER: "of 16 or 8 bits"}
        key = next((key for key in was if key in saved), None)
        if key is not None and self.param.dtype == torch.float32:
            raise ValueError(
                f"state of {self.name}: the parameter was {was[key]} when it was saved (the state "
                f"has {key!r}), and is float32 now. Convert the parameter before the optimizer is "
                "built or loaded. A function that loads weights may have changed the dtype (peft's "
                "load_adapter makes adapters float32 unless autocast_adapter_dtype=False)"
            )
        state = self.layout.take(saved)
        # A checksum covers the whole parameter, so this rank must have the whole parameter.
        is_tied = REMAINDER in state and self.layout.is_whole and not self._keeps_remainder()
        if checksum is not None and is_tied and not convert:
            # The weights of the save may be loaded after the remainder. Then ``weights`` has the
            # values that the parameter will get, and their checksum is compared.
            beside = self._local if weights is None else weights
            check_weights({self.slot: checksum}, lambda _: beside, lambda _: self.name)
        # Without a separate main param, fitted() joins the remainder if the formats differ.
        if REMAINDER in state and self.main is not None:
            state[MASTER] = joined(self.name, self._local, state.pop(REMAINDER))
        return super().fit(state, convert)

    def load(self, state: State) -> None:
        self.agreement.expected.pop(self.slot, None)
        self.agreement.written.discard(self.slot)
        is_narrowed = MASTER in state and self.executor.stepped(self.slot).dtype == torch.bfloat16
        if is_narrowed and not stands_for(state[MASTER], self._local):
            # Record the slot now, because load() splits the value into parameter and remainder.
            self.agreement.written.add(self.slot)
        super().load(state)

    # -- remainders, checked against the saved parameters -----------------------------------------

    def _keeps_remainder(self) -> bool:
        return REMAINDER in self.store.live_state(self.slot)

    def has_remainder(self) -> bool:
        """True if the main param is stored as the bfloat16 parameter and a remainder."""
        return self.executor.stepped(self.slot).dtype == torch.bfloat16 and self._keeps_remainder()

    @torch.no_grad()
    def finish_load(self, saved: State, checksum: int | None) -> bool:
        is_tied = REMAINDER in saved and self.layout.is_whole and self._keeps_remainder()
        if checksum is not None and is_tied and checksums_of([self._local]) != [checksum]:
            # The weights may be loaded after the optimizer's state, so the next use checks the
            # remainder.
            self.agreement.expected[self.slot] = checksum
        differs = self._write_model()
        if differs:
            self.layout.written()
        return differs

    def _write_model(self) -> bool:
        """Round the main param into the model's parameter. Return True if this changed the
        parameter."""
        noted = self.slot in self.agreement.written
        self.agreement.written.discard(self.slot)
        if not self.has_own_main or self.param.dtype == torch.float32:
            return noted  # No rounding: the parameter is stepped itself, or has all bits of main.
        if is_quantized(self.param):
            main = self.executor.main_param(self.slot)
            differs = not holds(self.param, main)
            if differs:
                quantize_(self.param, main)
            return differs
        main, local = self.executor.stepped(self.slot), self._local
        # If the main param is bfloat16, load() has recorded whether the parameter changed.
        differs = main.dtype == torch.float32 and not stands_for(main, local)
        value = main.to(device=local.device, dtype=local.dtype)
        if not same_values(value, local):
            local.copy_(value)
        return differs or noted
