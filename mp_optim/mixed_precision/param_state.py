"""How a precision wrapper shows the state of a model's parameter: in the parameter's layout, beside
its main param, and only beside the weights it was saved with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor

from mp_optim.config.rules import is_elementwise
from mp_optim.core import Slot, local_tensor, param_at
from mp_optim.core.executor import Executor
from mp_optim.core.flat_shard import is_cut
from mp_optim.core.quantized import holds, is_quantized, quantize_
from mp_optim.core.slot_state import (
    MASTER,
    REMAINDER,
    SlotState,
    State,
    StateLayout,
    WithMainParam,
    local_state,
    without_blocks,
)
from mp_optim.core.state_dict import names_in_words
from mp_optim.host.host_memory import same_values
from mp_optim.host.torch_types import is_dtensor
from mp_optim.kernels.checksums import checksums_of
from mp_optim.kernels.codecs import split_
from mp_optim.kernels.state_format import joined, unpacked


def as_sharded(local: Tensor, param: Tensor, key: str = "") -> Tensor:
    """State of a DTensor parameter as a DTensor of the same layout, in the memory where it is, on
    the host, too. Scalars, state of another shape, state that every rank keeps whole and that of
    plain parameters are returned unchanged.

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

    if local.device.type != param.device_mesh.device_type:  # from_local would bring it there
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


def state_layout_of(param: Tensor) -> StateLayout:
    """Return the layout of the state of a model's parameter: that of a DTensor, or as stored."""
    return StateLayout(
        show=lambda state: {key: as_sharded(value, param, key) for key, value in state.items()},
        take=local_state,
        is_as_stored=not is_dtensor(param),
        is_whole=not is_cut(param),
    )


class UntrainedState(SlotState):
    """Of a parameter that has never been trainable here: it costs nothing. Saved state, from a run
    that froze it later, makes it one that has been.

    Args:
        layout: how state would be shown.
        prepared: gives it a main param, which nothing shows yet; returns its state as that of one
            that is trained.
        take: makes it one that is.
    """

    def __init__(
        self, layout: StateLayout, prepared: Callable[[], SlotState], take: Callable[[], None]
    ) -> None:
        self.layout, self._prepared, self._take = layout, prepared, take

    @cached_property
    def _trained(self) -> SlotState:
        return self._prepared()

    def tensors(self) -> State:
        return {}

    def takes_any(self) -> bool:
        return not self.layout.refusal

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

    def reset(self) -> None:
        """There is nothing yet."""


class ParamState(WithMainParam):
    """Of a parameter that is trained.

    Args:
        executor: what steps the slot, and keeps its state.
        name: of the slot. param: the tensor in the wrapper's groups.
        is_separate: whether it is stepped on another tensor.
        agreement: what is not yet certain about loaded slots.
        layout: how state is shown.
    """

    def __init__(
        self,
        executor: Executor,
        slot: Slot,
        name: str,
        param: Tensor,
        is_separate: bool,
        agreement: Agreement,
        layout: StateLayout,
    ) -> None:
        missing = (
            f"state of {name}: master_param is missing, so its full-precision value is lost; "
            "to start from the model's values, add them under that key, or load what torch.optim "
            "saved by mp_optim.apps.convert.import_state(optimizer, "
            "from_torch(state_dict, names), main_from_model=True)"
        )
        self._executor, self._slot, self._param = executor, slot, param
        self._is_separate, self._agreement, self.layout = is_separate, agreement, layout
        self._stepped = stepped = param_at(executor.param_groups, slot)
        below = executor.state_of(slot)
        # else it is FP32 itself, or has a remainder
        has_main = is_separate and param.dtype != torch.float32 and stepped.dtype == torch.float32
        super().__init__(below, name, stepped if has_main or below.is_lone() else None, missing)

    @property
    def _local(self) -> Tensor:
        """What this rank has of the parameter."""
        return local_tensor(self._param)

    def tensors(self) -> State:
        if not self.layout.is_as_stored:
            return self.layout.show(self._beside_main(without_blocks(self.below)))
        return self.layout.show(unpacked(self.kept(), self._stepped))

    def shown(self) -> State:
        return self.tensors()

    def takes_any(self) -> bool:
        """Not of a DTensor: how a tensor of another shape is split is not known."""
        return self.layout.is_as_stored and self.below.takes_any()

    def full_precision(self) -> State:
        return self.layout.show(super().full_precision())

    def fit(self, saved: State, convert: bool) -> State:
        if saved and self.layout.refusal:
            if not convert:
                raise ValueError(self.layout.refusal)
            return {}
        state = self.layout.take(saved)
        if REMAINDER in state and self._main is not None:  # `fitted` joins it where bf16 is stepped
            state[MASTER] = joined(self.name, self._local, state.pop(REMAINDER))
        return super().fit(state, convert)

    def check(self, state: State) -> None:
        self._check_dtype(state)
        super().check(self.layout.take(state))

    def _check_dtype(self, saved: State) -> None:
        """Raise ValueError if an FP32 parameter is here that had fewer bits when it was saved."""
        if self._param.dtype != torch.float32:
            return
        was = {REMAINDER: "bfloat16", MASTER: "of 16 or 8 bits"}
        for key, dtype in was.items():
            if key in saved:
                raise ValueError(
                    f"state of {self.name}: the parameter was {dtype} when it was saved (it "
                    f"has {key!r}), and is float32 here. Give it the dtype it had before the "
                    "optimizer is built or loaded; what loads weights may have changed it (peft's "
                    "load_adapter makes adapters float32 unless autocast_adapter_dtype=False)"
                )

    def load(self, state: State) -> None:
        state = self.layout.take(state)
        self._agreement.forget(self._slot)
        is_narrowed = MASTER in state and self._stepped.dtype == torch.bfloat16
        if is_narrowed and not stands_for(state[MASTER], self._local):
            self._agreement.written.add(self._slot)  # as soon as parameter and remainder are split
        super().load(state)

    # -- remainders belong to the parameters they were saved with ---------------------------------

    def has_remainder(self) -> bool:
        """Whether the main param is the parameter and a remainder."""
        return self._stepped.dtype == torch.bfloat16 and REMAINDER in self.below.tensors()

    def check_weights(
        self, saved: State, checksum: int | None, weights: Tensor | None = None
    ) -> None:
        if checksum is None or REMAINDER not in saved or not self.layout.is_whole:
            return  # a checksum is of the whole parameter
        if REMAINDER in self.below.tensors():
            return  # its weights may be loaded later
        self._check_dtype(saved)
        beside = self._local if weights is None else weights
        self._agreement.check([(self._slot, checksum)], lambda _: beside, lambda _: self.name)

    def expect_weights(self, saved: State, checksum: int | None) -> None:
        if checksum is None or REMAINDER not in saved or not self.layout.is_whole:
            return
        if REMAINDER not in self.below.tensors():
            return
        if checksums_of([self._local]) != [checksum]:  # its weights are yet to come
            self._agreement.expected[self._slot] = checksum

    # -- the model's parameter --------------------------------------------------------------------

    @torch.no_grad()
    def write_model(self) -> bool:
        differs = self._write_model()
        if differs:
            self.layout.written()
        return differs

    def _write_model(self) -> bool:
        noted = self._slot in self._agreement.written
        self._agreement.written.discard(self._slot)
        if not self._is_separate or self._param.dtype == torch.float32:
            return noted  # it is stepped itself, or says all that its main param says
        if is_quantized(self._param):
            main = self._executor.main_param(self._slot)
            differs = not holds(self._param, main)
            if differs:
                quantize_(self._param, main)
            return differs
        main, local = self._stepped, self._local
        # a bfloat16 main param was noted when it was split
        differs = main.dtype == torch.float32 and not stands_for(main, local)
        value = main.to(device=local.device, dtype=local.dtype)
        if not same_values(value, local):
            local.copy_(value)
        return differs or noted
