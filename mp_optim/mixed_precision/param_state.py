"""How a precision wrapper shows the state of a model's parameter: in the parameter's layout, beside
its main param, and only beside the weights it was saved with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mp_optim.config.rules import is_elementwise
from mp_optim.core import Slot, local_tensor, param_at
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
    """Return state of a DTensor parameter as a DTensor of the same layout and memory.

    Scalars, state of another shape, state that every rank has whole, and state of plain parameters
    are returned unchanged.

    Args:
        key: of the state; empty for a main param.
    """
    if (
        not is_dtensor(param)
        or not is_elementwise(key)
        or not isinstance(local, Tensor)
        or local.shape != local_tensor(param).shape
    ):
        return local
    from torch.distributed.tensor import DTensor

    if (
        local.device.type != param.device_mesh.device_type
    ):  # from_local would move it to the mesh's device
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
        """Reset the record of a slot after a load."""
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
                f"{len(others)} parameters differ from the ones that their loaded remainders "
                f"belong to: {names_in_words(others)}. Load all model weights that were saved "
                "with this state; or, to continue from the current weights without the extra "
                "bits, load with convert=True or call reload_model_params()"
            )


def state_layout_of(param: Tensor) -> StateLayout:
    """Return the layout of the state of a model's parameter: that of a DTensor, or as stored."""
    return StateLayout(
        show=lambda state: {key: as_sharded(value, param, key) for key, value in state.items()},
        take=local_state,
        is_as_stored=not is_dtensor(param),
        is_whole=not is_cut(param),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class UntrainedState(SlotState):
    """State of a parameter that has never been trainable here: it costs nothing. Loading the state
    of a run that trained the parameter makes it trainable.

    Attributes:
        prepared: makes a main param, which nothing shows yet, and returns the state of a trained
            parameter.
        take: makes the parameter one that was trainable.
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


def param_state(
    executor: Executor,
    slot: Slot,
    name: str,
    param: Tensor,
    has_own_main: bool,
    agreement: Agreement,
    layout: StateLayout,
) -> ParamState:
    """Return the state of a parameter that is trained.

    Args:
        executor: steps the slot, and keeps its state.
        name: FQN of the slot.
        param: the tensor in the wrapper's groups.
        has_own_main: True if another tensor is stepped for it.
        agreement: agreement of the wrapper.
        layout: layout in which state is shown.
    """
    below, stepped = executor.state_of(slot), param_at(executor.param_groups, slot)
    # otherwise the parameter is FP32, or has a remainder
    has_fp32_main = has_own_main and param.dtype != torch.float32 and stepped.dtype == torch.float32
    is_shown = has_fp32_main or below.store.has_no_fp32_main(below.slot)
    return ParamState(
        below.store,
        below.slot,
        name,
        stepped if is_shown else None,
        f"state of {name}: master_param is missing, so its full-precision value is lost; "
        "to start from the model's values, add them under that key, or load what torch.optim "
        "saved by mp_optim.apps.convert.import_state(optimizer, "
        "from_torch(state_dict, names), main_from_model=True)",
        layout,
        executor=executor,
        param=param,
        has_own_main=has_own_main,
        agreement=agreement,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ParamState(SlotState):
    """State of a parameter that is trained (:func:`param_state`)."""

    executor: Executor
    param: Tensor
    has_own_main: bool
    agreement: Agreement

    @property
    def _local(self) -> Tensor:
        """This rank's part of the parameter."""
        return local_tensor(self.param)

    @property
    def _stepped(self) -> Tensor:
        return param_at(self.executor.param_groups, self.slot)

    def fit(
        self,
        saved: State,
        convert: bool = False,
        checksum: int | None = None,
        weights: Tensor | None = None,
    ) -> State:
        if not saved or self.layout.refusal:
            return super().fit(saved, convert)
        self._check_dtype(saved)
        state = self.layout.take(saved)
        is_tied = self._belongs_to_weights(state) and not self._keeps_remainder()
        if checksum is not None and is_tied and not convert:
            # a remainder may be loaded before its weights
            beside = self._local if weights is None else weights
            self.agreement.check([(self.slot, checksum)], lambda _: beside, lambda _: self.name)
        if REMAINDER in state and self.main is not None:  # `fitted` joins it where bf16 is stepped
            state[MASTER] = joined(self.name, self._local, state.pop(REMAINDER))
        return super().fit(state, convert)

    def _check_dtype(self, saved: State) -> None:
        """Raise ValueError if an FP32 parameter is here that had fewer bits when it was saved."""
        if self.param.dtype != torch.float32:
            return
        was = {REMAINDER: "bfloat16", MASTER: "of 16 or 8 bits"}
        for key, dtype in was.items():
            if key in saved:
                raise ValueError(
                    f"state of {self.name}: the parameter was {dtype} when it was saved (the "
                    f"state has {key!r}), and is float32 now. Convert it before the optimizer is "
                    "built or loaded; a function that loads weights may have changed it (peft's "
                    "load_adapter makes adapters float32 unless autocast_adapter_dtype=False)"
                )

    def load(self, state: State) -> None:
        self.agreement.forget(self.slot)
        is_narrowed = MASTER in state and self._stepped.dtype == torch.bfloat16
        if is_narrowed and not stands_for(state[MASTER], self._local):
            self.agreement.written.add(self.slot)  # as soon as parameter and remainder are split
        super().load(state)

    # -- remainders belong to the parameters they were saved with ---------------------------------

    def _belongs_to_weights(self, saved: State) -> bool:
        """Whether a saved state belongs to the parameter whose checksum was saved with it: a
        checksum is of the whole parameter."""
        return REMAINDER in saved and self.layout.is_whole

    def _keeps_remainder(self) -> bool:
        return REMAINDER in self.store.live_state(self.slot)

    def has_remainder(self) -> bool:
        """Whether the main param is the parameter and a remainder."""
        return self._stepped.dtype == torch.bfloat16 and self._keeps_remainder()

    @torch.no_grad()
    def finish_load(self, saved: State, checksum: int | None) -> bool:
        is_tied = self._belongs_to_weights(saved) and self._keeps_remainder()
        if checksum is not None and is_tied and checksums_of([self._local]) != [checksum]:
            self.agreement.expected[self.slot] = checksum  # its weights are loaded later
        differs = self._write_model()
        if differs:
            self.layout.written()
        return differs

    def _write_model(self) -> bool:
        """Give the model's parameter the value of the main param; return whether it had another."""
        noted = self.slot in self.agreement.written
        self.agreement.written.discard(self.slot)
        if not self.has_own_main or self.param.dtype == torch.float32:
            return noted  # the parameter itself is stepped, or has all bits of its main param
        if is_quantized(self.param):
            main = self.executor.main_param(self.slot)
            differs = not holds(self.param, main)
            if differs:
                quantize_(self.param, main)
            return differs
        main, local = self._stepped, self._local
        # the checksum of a bfloat16 main param was recorded when it was split
        differs = main.dtype == torch.float32 and not stands_for(main, local)
        value = main.to(device=local.device, dtype=local.dtype)
        if not same_values(value, local):
            local.copy_(value)
        return differs or noted
