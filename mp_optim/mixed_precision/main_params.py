"""MainParams: the tensor that is stepped for each trainable parameter of the model, kept equal to
the parameter.

A wrapper's ``param_groups`` are live and hold the model's own parameters, where torch schedulers,
DCP, accelerate and the HF Trainer expect them. The groups of the inner optimizer hold the main
params. A parameter and its main param have the same position in their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.core import (
    ParamGroups,
    Slot,
    all_params,
    check_shape,
    follow,
    iter_slots,
    local_tensor,
    param_at,
    same_memory,
    slot_name,
    stream_of,
)
from mp_optim.core.executor import Executor
from mp_optim.core.interrupted_step import StepMark
from mp_optim.core.param_attributes import (
    check_attributes,
    is_tensor_parallel,
    set_main_param,
    shard_info,
    shown_mains_of,
)
from mp_optim.core.quantized import check_quantized, dequantized, holds, is_quantized, quantize_
from mp_optim.core.slot_state import MASTER, SlotState, StateLayout, StateStore
from mp_optim.core.tensor_layout import (
    ParamLayout,
    first_element,
    layout_of,
    ranks_of_copies,
    region_of,
    shard_groups_of,
    split_dims,
)
from mp_optim.core.tensors import check_memory
from mp_optim.host.calls import in_own_modes
from mp_optim.host.leases import give_memory
from mp_optim.host.torch_types import is_dtensor
from mp_optim.kernels.checksums import WrittenWeights, checksums_of
from mp_optim.kernels.sums import Groups
from mp_optim.mixed_precision.grad_norm import EXCLUDED, MAIN_NORM, NormKey
from mp_optim.mixed_precision.observer import WeightObserver
from mp_optim.mixed_precision.param_state import (
    Agreement,
    ParamState,
    UntrainedState,
    check_weights,
    state_layout_of,
)
from mp_optim.mixed_precision.slot_table import SlotTable
from mp_optim.process_groups.process_groups import ProcessGroups


class MainParams:
    """The main params of a wrapper, and the state of the main params.

    Args:
        param_groups: the wrapper's live groups of the model's parameters.
        executor: executor that steps the main params. After this constructor the executor's groups
            contain the main params.
        process_groups: the ranks that share the model. They determine which parameters are
            duplicates.
        check_param: function of a name and a trainable parameter that raises if the dtype does not
            fit the wrapper. It must not keep the wrapper alive.

    Attributes:
        table: the slot table.
        written: checksums of the weights that step kernels do not compare with main params.
        agreement: loaded slots that are not yet compared with the model.
        executor: the executor of the argument.
        observers: observers of the weights.
        reloaded: number of main params that took the value of a parameter that other code wrote.
        layout_of: function that returns the layout in which an enclosing optimizer exports the
            state of a slot; None for the layout of the slot's parameter.

    Raises:
        TypeError, ValueError: a parameter cannot be stepped; the message has the parameter's name.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        executor: Executor,
        process_groups: ProcessGroups,
        check_param: Callable[[str, Tensor], None],
    ) -> None:
        self._param_groups, self.executor = param_groups, executor
        self.process_groups, self._check_param = process_groups, check_param
        self.agreement = Agreement()
        self._prepared: dict[Slot, Tensor] = {}
        """For each frozen slot whose saved state may be loaded, the parameter for which a main
        param was made."""
        self._shown = shown_mains_of(self)
        self.table = SlotTable(executor)
        self.written = WrittenWeights()
        self.observers: list[WeightObserver] = []
        self.reloaded = 0
        self.layout_of: Callable[[Slot], StateLayout] | None = None
        for index in range(len(param_groups)):
            self.bind_group(index)

    # -- binding ----------------------------------------------------------------------------------

    @in_own_modes
    def bind_group(self, index: int) -> None:
        """Make main params for the trainable parameters of a new group. All checks come first, and
        the table is changed last, so an error changes nothing in the table.

        Args:
            index: index of the group, the last one.
        """
        table, params = self.table, self._param_groups[index]["params"]
        if index == len(self._param_groups) - 1:
            self._check_memory()
        coming = [
            (Slot(index, position), local_tensor(param))
            for position, param in enumerate(params)
            if param.requires_grad and not is_quantized(param)
        ]
        for position, param in enumerate(params):
            if param.is_inference():
                raise TypeError(
                    f"{self.name(Slot(index, position))} was created inside "
                    "torch.inference_mode(), so it cannot be trained; build the model outside of "
                    "torch.inference_mode()"
                )
        self.executor.reserve_main_params(coming)
        rows: list[tuple[Slot, Tensor, int, NormKey, ParamLayout, Groups]] = []
        mains: dict[Slot, Tensor] = {}
        for position, param in enumerate(params):
            slot = Slot(index, position)
            stream = stream_of(self.name(slot), first_element(param))
            rows.append((slot, param, stream, *self._split_of(slot, param)))
            if param.requires_grad:
                mains[slot] = self._new_main(slot, param)
        table.first.append(len(table.slots))
        for row in rows:
            table.add(*row)
            if row[0] in mains:
                self._set_main(len(table.slots) - 1, mains[row[0]], row[1])

    @in_own_modes
    def make_trainable(self, indices: Iterable[int]) -> None:
        """Make main params for parameters that were frozen when their group was added.

        Args:
            indices: indices in the table of the slots that are trainable now.
        """
        coming = [index for index in indices if not self.table.has_main[index]]
        if coming:
            self._check_memory()
        for index in coming:
            self._make_trainable(self.table.slots[index])

    def _check_memory(self) -> None:
        """Raise ValueError, with the names, if trained parameters share memory."""
        check_memory(
            (self.name(slot), param)
            for slot, param in iter_slots(self._param_groups)
            if param.requires_grad
        )

    def _make_trainable(self, slot: Slot) -> None:
        main, param = self._prepare_main(slot), self.param(slot)
        if self._is_own_main(slot, main):
            is_coded = is_quantized(param)
            value = dequantized(param) if is_coded else local_tensor(param)
            self.executor.set_main_param(slot, value)
        del self._prepared[slot]
        self._set_main(self.table.index(slot), main, param)

    def _prepare_main(self, slot: Slot) -> Tensor:
        """Return a main param for a slot that may become trainable. The table does not record the
        main param yet."""
        param = self.param(slot)
        if self._prepared.get(slot) is not param:
            self._new_main(slot, param)
            self._prepared[slot] = param
        return self.executor.stepped(slot)

    def _new_main(self, slot: Slot, param: Tensor) -> Tensor:
        """Return the tensor that is stepped for a parameter from now on: the parameter itself or a
        new tensor."""
        self._check_param(self.name(slot), param)
        check_attributes(self.name(slot), param)
        check_quantized(self.name(slot), param)
        local = dequantized(param) if is_quantized(param) else local_tensor(param)
        return self.executor.new_main_param(slot, local)

    def _is_own_main(self, slot: Slot, main: Tensor) -> bool:
        """True if ``main`` is another tensor than the model's parameter at a slot."""
        return is_quantized(self.param(slot)) or not same_memory(main, self._local(slot))

    def _set_main(self, index: int, main: Tensor, param: Any) -> None:
        """Record a main param in the table. From now on the slot has state."""
        # Free the values from which Transformer Engine quantized the parameter: the main param has
        # these values.
        if getattr(param, "get_high_precision_init_val", lambda: None)() is not None:
            param.clear_high_precision_init_val()
        slot = self.table.slots[index]
        set_main_param(self._shown, slot, param, main)
        self.table.has_own_main[index] = self._is_own_main(slot, main)
        self.table.has_main[index] = True
        self.executor.step_mark.invalidate_plans()

    def _split_of(self, slot: Slot, param: Tensor) -> tuple[NormKey, ParamLayout, Groups]:
        ranks, shard_groups = self._tensor_parallel(slot), shard_groups_of(self.name(slot), param)
        is_part = is_tensor_parallel(param)
        is_copy = ranks is not None and not is_part and ranks.rank() > 0
        # Exclude copies, because the norm counts a shared parameter's gradient on one rank only.
        is_counted = not (is_copy or getattr(param, "shared", False))
        group = (getattr(param, "grad_norm_group", None) or MAIN_NORM) if is_counted else EXCLUDED
        split_over = (*shard_groups, ranks) if ranks is not None and is_part else shard_groups
        return NormKey(group, shard_groups), layout_of(param, ranks), split_over

    def _tensor_parallel(self, slot: Slot) -> ProcessGroup | None:
        expert = self._param_groups[slot.group].get("is_expert_parallel", False)
        return self.process_groups.expert_tp if expert else self.process_groups.tp

    # -- lookups ----------------------------------------------------------------------------------

    def name(self, slot: Slot) -> str:
        """Return a slot's FQN."""
        return slot_name(self._param_groups, slot)

    def param(self, slot: Slot) -> Tensor:
        """Return the model's current parameter at a slot."""
        return param_at(self._param_groups, slot)

    def _local(self, slot: Slot) -> Tensor:
        return local_tensor(self.param(slot))

    def has_own_main(self, slot: Slot) -> bool:
        """True if a slot is stepped on another tensor than the model's parameter."""
        return self.table.has_own_main[self.table.index(slot)]

    def has_main(self, slot: Slot) -> bool:
        """True if the parameter at a slot was ever trainable."""
        return self.table.has_main[self.table.index(slot)]

    def main_param(self, slot: Slot) -> Tensor:
        """Return the main param of a slot that was ever trainable, in the layout that callers see.
        Return the model's parameter if the parameter itself is stepped."""
        param = self.param(slot)
        if param.dtype != torch.float32 or self.has_own_main(slot):
            self._hand_out(slot)
            main = self.executor.main_param(slot)
        elif self.layout_of is None:
            return param
        else:
            main = param.detach()
        shown: Tensor = self._state_layout(slot).show({MASTER: main})[MASTER]
        return shown

    def sharers(self, slot: Slot) -> tuple[ProcessGroup, ...]:
        """Return the groups of ranks that have other parts of a slot's parameter, or copies of this
        rank's part."""
        param, ranks = self.param(slot), self._tensor_parallel(slot)
        if is_dtensor(param):
            copies = ranks_of_copies(param)
        else:
            is_copy = ranks is not None and not is_tensor_parallel(param)
            copies = (ranks,) if ranks is not None and is_copy else ()
        return *self.table.keys[self.table.index(slot)].shard_groups, *copies

    def is_first_copy(self, slot: Slot) -> bool:
        """True if no rank before this one has the same elements of a slot's parameter."""
        param, groups = self.param(slot), self.process_groups
        if is_dtensor(param):
            place, split = param.device_mesh.get_coordinate(), split_dims(param)
            return place is not None and all(
                dim in split or index == 0 for dim, index in enumerate(place)
            )
        parts, tp = shard_info(param).shard_groups, self._tensor_parallel(slot)
        of_plain = (groups.dp, None if is_tensor_parallel(param) else tp)
        copies = [ranks for ranks in of_plain if ranks is not None and ranks not in parts]
        return all(ranks.rank() == 0 for ranks in copies)

    def slots_with_main(self) -> Iterator[Slot]:
        """Return the slots of parameters that were ever trainable, in slot order."""
        return filter(self.has_main, self.table.slots)

    def set_stepped_value(self, slot: Slot, value: Tensor) -> None:
        """Set the main param of a slot to an FP32 value, and round the model's parameter from it.

        Args:
            slot: the slot.
            value: FP32, shape of the main param.
        """
        self.executor.set_main_param(slot, value)
        param = self.param(slot)
        for observer in self.observers:
            observer.weight_written(self.table.index(slot))
        if is_quantized(param):
            quantize_(param, self.executor.main_param(slot))
        elif self.has_own_main(slot):
            local_tensor(param).copy_(self.executor.stepped(slot))

    def _hand_out(self, slot: Slot) -> None:
        """Record that a caller gets the main param or state of a slot, because the caller may write
        to these tensors."""
        index = self.table.index(slot)
        self.written.forget(index)
        for observer in self.observers:
            observer.state_exposed(index)

    # -- following the model ----------------------------------------------------------------------

    @in_own_modes
    def follow(self, slot: Slot | None = None) -> None:
        """Refresh main params from the model: bind tensors that were replaced, and copy the model's
        values that differ from the rounded main params.

        Values are compared, because writes to ``param.data`` change no version counter.

        Args:
            slot: the slot to compare; None for every slot.

        Raises:
            TypeError: the dtype of a tensor cannot be stepped; the message names the parameter.
            ValueError: the shape of a tensor changed, its memory was freed, or two parameters share
                memory.
        """
        self.executor.step_mark.open_state()
        table, params = self.table, all_params(self._param_groups)
        if changed := table.seen.changed(params):
            self.follow_changed(changed, params)
        indices = range(len(table.slots)) if slot is None else (table.index(slot),)
        self.take_values([index for index in indices if table.has_own_main[index]])

    def by_sums(self) -> set[int]:
        """Return the indices of weights that a step compares with their main params only if their
        checksum changed: quantized weights, and weights on another device than the main param."""
        table = self.table
        found = {index for index, is_coded in enumerate(table.quantized) if is_coded}
        found.update(map(table.index, self.executor.host_slots()))
        return {index for index in found if table.has_own_main[index]}

    def follow_changed(self, changed: list[int], params: list[Tensor]) -> None:
        """Bind model tensors that were replaced, moved or laid out in another way since the last
        step.

        Args:
            changed: indices of these tensors.
            params: all tensors of the model, in slot order.
        """
        table = self.table
        places = {id(param): index for index, param in enumerate(table.seen.params)}
        for index in changed:
            before = places.get(id(params[index]), index)
            if before != index:
                now, was = self.name(table.slots[index]), self.name(table.slots[before])
                raise ValueError(
                    f"{now} has taken the position of {was} in param_groups, but optimizer state "
                    "does not move with a parameter; keep the order of the parameters (to change "
                    "settings, edit the groups), or build another optimizer"
                )
        self._check_memory()
        for index in changed:
            slot, param = table.slots[index], params[index]
            if table.has_main[index]:
                self._rebind(index, slot, param)
            split = self._split_of(slot, param)
            table.keys[index], table.layouts[index], table.split_over[index] = split
        table.seen.look(params)
        table.quantized = list(map(is_quantized, params))
        self.executor.step_mark.invalidate_plans()

    def take_values(self, indices: Sequence[int]) -> None:
        """Copy the model's values into main params that do not round to these values. The slots in
        :meth:`by_sums` are compared only if the checksum of the weight changed.

        Args:
            indices: indices of the slots in the table.
        """
        by_sums = self.table.reuse("by_sums", self.by_sums)
        present = [index for index in indices if not self.table.params[index].is_meta]
        summed = [index for index in present if index in by_sums]
        changed = self.written.changed(summed, [self.table.weight_at(index) for index in summed])
        chosen = {summed[index] for index in changed}.union(set(present) - by_sums)
        for index in sorted(chosen):
            slot, param = self.table.slots[index], self.table.params[index]
            if not is_quantized(param):
                differs = follow(self.executor.stepped(slot), local_tensor(param), self.name(slot))
            else:
                check_quantized(self.name(slot), param)
                differs = not holds(param, self.executor.main_param(slot))
                if differs:
                    self.executor.step_mark.open_state()
                    self.executor.set_main_param(slot, dequantized(param))
            if differs:
                self.reloaded += 1
                self.executor.main_written(slot)
                for observer in self.observers:
                    observer.weight_written(index)
        again = [index for index in summed if index in chosen]
        self.written.note(again, [self.table.weight_at(index) for index in again])

    def _rebind(self, index: int, slot: Slot, param: Tensor) -> None:
        main, local = self.executor.stepped(slot), local_tensor(param)
        self._check_param(self.name(slot), param)
        check_shape(main, local, self.name(slot))
        if is_quantized(param) != self.table.quantized[index]:
            self._set_main(index, self._new_main(slot, param), param)
        elif self.table.has_own_main[index]:
            set_main_param(self._shown, slot, param, main)
            executor, home = self.executor, self.executor.home(slot, param)
            is_parked = id(main) in executor.step_mark.parked.homes
            if main.device != home and home == local.device and not is_parked:
                # model.to(device) moved the parameter, so its main param and state follow.
                give_memory(main, main.data.to(home))
                executor.memory_moved(slot)
            # Drop the checksum, so that the next check compares the values of the new tensor.
            self.written.forget(index)
        elif param.dtype == main.dtype:
            self.executor.step_instead(slot, local)
            set_main_param(self._shown, slot, param, local)
        else:
            # The dtype decides whether the parameter needs a separate main param, so replace the
            # main param.
            self._set_main(index, self._new_main(slot, param), param)

    @in_own_modes
    def reload(self, values: Mapping[str, Any]) -> None:
        """Continue from the model's present values, as a step does. Drop remainders that were
        loaded for other weights.

        Args:
            values: full-precision values by FQN. They replace the main params and the model's
                parameters of these names.
        """
        self.follow()
        table = self.table
        for index, slot in enumerate(table.slots):
            given = values.get(self.name(slot)) if table.has_main[index] else None
            if given is not None:
                value = dequantized(given) if is_quantized(given) else local_tensor(given)
                self.set_stepped_value(slot, value)
            elif slot in self.agreement.expected:
                self.executor.set_main_param(slot, self._local(slot))
        self.agreement.expected.clear()

    # -- state ------------------------------------------------------------------------------------

    def _state_layout(self, slot: Slot) -> StateLayout:
        if self.layout_of is None:
            return state_layout_of(self.param(slot))
        return self.layout_of(slot)

    def state_of(self, slot: Slot) -> SlotState:
        """Return a slot's state in the layout that callers see."""
        if not self.has_main(slot):

            def prepared() -> ParamState:
                return self._trained_state(slot, self._is_own_main(slot, self._prepare_main(slot)))

            return UntrainedState(
                StateStore(),
                slot,
                self.name(slot),
                layout=self._state_layout(slot),
                prepared=prepared,
                take=partial(self._make_trainable, slot),
            )
        return self._trained_state(slot, self.has_own_main(slot))

    def _trained_state(self, slot: Slot, separate: bool) -> ParamState:
        self._hand_out(slot)
        param, name, executor = self.param(slot), self.name(slot), self.executor
        below, stepped = executor.state_of(slot), executor.stepped(slot)
        # A slot has an FP32 main param, unless the parameter is FP32 itself or the main param is
        # stored as a remainder.
        has_fp32_main = separate and param.dtype != torch.float32
        has_fp32_main = has_fp32_main and stepped.dtype == torch.float32
        is_shown = has_fp32_main or below.store.has_no_fp32_main(below.slot)
        return ParamState(
            below.store,
            below.slot,
            name,
            stepped if is_shown else None,
            f"state of {name}: master_param is missing, which is the value in full precision; to "
            "start from the model's values, add these values under the key 'master_param', or load "
            "a state dict of torch.optim by mp_optim.apps.convert.import_state(optimizer, "
            "from_torch(state_dict, names), main_from_model=True)",
            self._state_layout(slot),
            executor=executor,
            param=param,
            has_own_main=separate,
            agreement=self.agreement,
        )

    def checksums(self) -> list[int | None]:
        """Return a checksum of the parameter at each slot that has a remainder. Return None for
        other slots, and for parameters of which this rank has only a part."""
        slots = [
            slot
            for slot in filter(self.has_main, self.table.slots)
            if self._state_layout(slot).is_whole
            and self._trained_state(slot, self.has_own_main(slot)).has_remainder()
        ]
        known = dict(zip(slots, checksums_of([self._local(slot) for slot in slots]), strict=True))
        return [known.get(slot) for slot in self.table.slots]

    def check_remainders(self, slot: Slot | None) -> None:
        """Raise ValueError, with the names, if a loaded remainder does not belong to the present
        value of its parameter.

        Args:
            slot: the slot to check; None for all.
        """
        expected = self.agreement.expected
        slots = list(expected) if slot is None else [slot]
        chosen = {each: expected[each] for each in slots if each in expected}
        check_weights(chosen, self._local, self.name)
        # The weights have the checksums of the save, so no later call has to check these slots.
        for proven in chosen:
            del expected[proven]


# -- scaling --------------------------------------------------------------------------------------


@in_own_modes
def scale_rows_(
    wrappers: Sequence[MainParams], factors: Mapping[str, Tensor], mark: StepMark
) -> None:
    """Multiply the rows of parameters on this rank
    (:meth:`~mp_optim.MegatronOptimizer.scale_rows_`).

    Args:
        wrappers: main params of each wrapper.
        factors: by FQN, one factor for each row.
        mark: consistency flag, set before the first write.
    """
    if not isinstance(factors, Mapping):
        raise ValueError(
            f"scale_rows_: factors is a {type(factors).__name__}; pass a dict of tensors by name"
        )
    places = {
        wrapper.name(slot): (wrapper, slot)
        for wrapper in wrappers
        for slot in wrapper.slots_with_main()
    }
    for name, of_rows in factors.items():
        if name not in places:
            raise ValueError(
                f"scale_rows_: {name} is not a trained parameter; use the names of "
                "named_main_params()"
            )
        wrapper, slot = places[name]
        _check_factors(name, wrapper.param(slot), of_rows)
    mark.touch()
    for name, of_rows in factors.items():
        wrapper, slot = places[name]
        main = wrapper.executor.main_param(slot)
        if not main.numel():
            continue
        region, local = region_of(wrapper.param(slot)), local_tensor(wrapper.param(slot))
        of_rows = of_rows.to(main.device)
        if region.offsets is not None:
            first = region.offsets[0]
            of_elements = of_rows[first : first + local.shape[0]].view(-1, *[1] * (local.dim() - 1))
        else:
            indices = torch.arange(local.numel(), device=main.device) + region.start
            of_elements = of_rows[indices // region.shape[1:].numel()].view(local.shape)
        wrapper.set_stepped_value(slot, main * of_elements.float())


def _check_factors(name: str, param: Tensor, factors: Any) -> None:
    shape = region_of(param).shape
    is_plain = isinstance(factors, Tensor) and factors.layout == torch.strided
    is_plain = is_plain and not (factors.is_meta or is_dtensor(factors))
    if not (is_plain and factors.is_floating_point() and shape and factors.shape == shape[:1]):
        form = tuple(getattr(factors, "shape", ()))
        raise ValueError(
            f"scale_rows_: the factors of {name} are a {type(factors).__name__} of shape {form}, "
            f"and the parameter has shape {tuple(shape)}; give a plain dense floating-point tensor "
            "with one factor for each row of the parameter"
        )
    finite = factors.float().isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(
            f"scale_rows_: the factor of row {row} of {name} is {float(factors[row])!r}, which is "
            "not finite in FP32; pass finite factors"
        )
