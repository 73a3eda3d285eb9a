"""The base class of all optimizers in this package: a torch optimizer that keeps its state by slot.
This module also loads state dicts into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mp_optim.core import ParamGroups, Slot, iter_slots, param_at, slot_name
from mp_optim.core.executor import Executor
from mp_optim.core.identity import (
    SharedSettings,
    check_assigned,
    edited_lists,
    make_plain,
    sizes_of,
)
from mp_optim.core.interrupted_step import StepMark
from mp_optim.core.model_parallel import ModelParallel, renamed_groups
from mp_optim.core.names import names_in_words
from mp_optim.core.read_only import ReadOnlyTensor
from mp_optim.core.slot_state import SlotState, State
from mp_optim.core.state_dict import (
    CHECKSUMS,
    GroupMatch,
    StateLoad,
    carried,
    check_is_state_dict,
    checked_match,
    plain_groups,
)
from mp_optim.core.state_view import Assignment, ShownState, SlotStateView
from mp_optim.core.tensors import local_tensor
from mp_optim.host.calls import in_own_modes, warn

Closure = Callable[[], Any]


class SlotKeyedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` that keys its state by slot, ``(group, position)``.

    The state of a slot is kept by an executor or by member optimizers, depending on the subclass.
    This class exports, saves, matches and loads the state.

    Attributes:
        executor: the executor that steps the slots, unless the subclass has member optimizers.
        groups_below: param groups of each optimizer that this optimizer wraps; each has as many
            groups as this optimizer.
        grad_scaler: the loss scaler, or None.
        state_index: cache of ``optimizer.state``: the slot of each tensor, by the tensor's id.
            Every lookup compares the entry with ``param_groups``, because tensors are replaced.
        shown_states: the objects that ``optimizer.state`` returned and callers still hold, by slot.
        model_parallel: this rank's part of the model. State dicts and checkpoints have the names of
            the whole model; param groups and messages have the local names.
    """

    executor: Executor
    _live_groups: ParamGroups
    """The param groups, in one list object for the optimizer's life. torch's constructor assigns
    and fills ``param_groups``, so a subclass sets this attribute first."""
    _sizes: list[int]
    """The number of parameters of each group; empty until :meth:`lists_are_known` is called. A
    subclass sets this attribute before it calls this constructor."""
    groups_below: Sequence[ParamGroups] = ()
    grad_scaler: Any = None
    model_parallel: ModelParallel = ModelParallel()

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self.state_index: dict[int, Slot] = {}
        self.shown_states: WeakValueDictionary[Slot, ShownState] = WeakValueDictionary()
        self._told_of_host = False
        self.step_mark = StepMark()
        self.shared_settings = SharedSettings()
        make_plain(defaults)
        super().__init__(params, defaults)

    @property
    def stack(self) -> SlotKeyedOptimizer:
        """This optimizer with all of its layers. A subclass may build the layers at the first
        access."""
        return self

    # -- forwarded to the executor; subclasses may override --------------------------------------

    def state_of(self, slot: Slot) -> SlotState:
        """Return a slot's state in the form that this layer exports and loads."""
        return self.executor.state_of(slot)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        """Allocate the state of some slots together, in contiguous memory where possible."""
        self.executor.allocate_state(slots)

    def home(self, slot: Slot) -> torch.device:
        """Return the device that stores main param and state of a slot between steps: its
        parameter's device, or the host."""
        return self.executor.home(slot, param_at(self.param_groups, slot))

    def memory_moved(self, slot: Slot | None = None) -> None:
        """Drop cached addresses after main params and state were moved to other memory.

        Args:
            slot: the slot whose tensors were moved; None for all slots.
        """
        self.executor.memory_moved(slot)

    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise ValueError if a setting of a param group cannot be used in a step; the message has
        name and value."""
        self.executor.check_settings(group)

    # -- param groups -----------------------------------------------------------------------------

    @property
    def param_groups(self) -> ParamGroups:
        """The param groups with the current parameters. The list object stays the same: if a caller
        assigns another list, its groups are copied into this list."""
        return self._live_groups

    @param_groups.setter
    def param_groups(self, groups: ParamGroups) -> None:
        if self._sizes:
            check_assigned(self._live_groups, groups, self.defaults)
        self._live_groups[:] = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's method does. A refused group changes nothing.

        Args:
            param_group: ``params``, and hyperparameters that differ from the defaults.

        Raises:
            TypeError: a parameter is not a tensor, or a setting has a wrong type.
            ValueError: a parameter or a setting is not valid.
            RuntimeError: the call is inside a ``with optimizer.averaged_weights()`` block.
        """
        self.step_mark.check_lent("add_param_group")
        make_plain(param_group)
        super().add_param_group(param_group)
        self.lists_are_known()

    @contextmanager
    def added_whole(self) -> Iterator[None]:
        """Return a context in which the caller adds a group. If the block raises, the group is
        removed from this optimizer and from the optimizers below."""
        self.check_lists()
        count = len(self.param_groups)
        try:
            yield
        except BaseException:
            self.forget_groups(count)
            raise

    def lists_are_known(self) -> None:
        """Record the number of groups, and of parameters in each group, to detect edited lists
        later."""
        self._sizes[:] = sizes_of(self.param_groups)

    def has_edited_lists(self) -> bool:
        """True if the caller added or removed groups or parameters by editing the lists."""
        return sizes_of(self.param_groups) != self._sizes

    def check_lists(self) -> None:
        """Raise ValueError if the caller added or removed groups or parameters by editing the
        lists; the message names the first such group."""
        sizes = sizes_of(self._live_groups)
        if self._sizes and sizes != self._sizes:
            raise edited_lists(sizes, self._sizes)

    def forget_groups(self, count: int) -> None:
        """Remove all groups after the first ``count``, including a group that was added only in
        part."""
        del self.param_groups[count:]
        self.shared_settings.forget_groups(count)
        self.lists_are_known()

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; the host without parameters."""
        params = (local_tensor(param) for _, param in iter_slots(self.param_groups))
        return next((param.device for param in params), torch.device("cpu"))

    # -- interrupted steps ------------------------------------------------------------------------

    def use_mark(self, mark: StepMark) -> None:
        """Use the consistency flag of the layer above, in place of this layer's flag."""
        self.step_mark = mark
        self.executor.use_mark(mark)

    def recover(self) -> None:
        """Discard pending work of an interrupted step. The caller loads all values afterwards."""
        self.executor.recover()

    # -- optimizers below -------------------------------------------------------------------------

    def share_settings(self) -> None:
        """Copy settings that changed since the last call between the groups of this optimizer and
        the groups of the optimizers below.

        Raises:
            ValueError: two optimizers below wrote different values for one group; the message has
                the values.
        """
        self.shared_settings.exchange(self._live_groups, self.groups_below)

    # -- state ------------------------------------------------------------------------------------

    def slot_state(self, slot: Slot) -> State:
        """Return the state tensors of a slot by key, as state dicts have them. Missing state is
        allocated.

        The tensors are those that steps write, except 4-bit moments, which are FP32 copies.

        Args:
            slot: index of the param group, and position in the group.
        """
        self.make_current(slot)
        return self.state_of(slot).exported()

    @in_own_modes
    def shown_state(self, slot: Slot) -> State:
        """Return the state of a slot as ``optimizer.state[param]`` has it: live tensors, and
        read-only FP32 copies of moments in float16, 8 or 4 bits."""
        self.make_current(slot)
        state = self.state_of(slot)
        saved, coded = state.exported(), state.coded()
        with torch.inference_mode():
            copies = {
                key: moment.values().as_subclass(ReadOnlyTensor) for key, moment in coded.items()
            }
            return saved | (state.layout.show(copies) if copies else {})

    def full_slot_state(self, slot: Slot) -> State:
        """Return the state of a slot in FP32, by key. Tensors that are stored in fewer bits are
        copied.

        Args:
            slot: index of the param group, and position in the group.
        """
        self.make_current(slot)
        return self.state_of(slot).full_precision()

    def load_slot_state(self, slot: Slot, state: State) -> None:
        """Copy a saved state into the slot.

        Args:
            slot: index of the param group, and position in the group.
            state: the saved state by key, a result of :meth:`slot_state` or
                :meth:`full_slot_state`.

        Raises:
            ValueError: a key is missing or unknown, a value does not fit, or bits would be lost.
        """
        self.make_current(slot, follow_only=True)
        own = self.state_of(slot)
        own.load(own.fit(state))

    def has_slot_state(self, slot: Slot) -> bool:
        """True if a slot has any state."""
        self.make_current(slot)
        return bool(self.state_of(slot).live())

    @in_own_modes
    def assign_states(self, states: Mapping[Slot, State], *, whole: bool) -> None:
        """Store the values that a caller assigned to ``optimizer.state``. If any value does not
        fit, store no value.

        Args:
            states: the assigned values by slot and key.
            whole: True if the values are the complete state of these slots.
        """
        self.step_mark.check("state")
        self.make_current(follow_only=True)
        parked, taken = self.step_mark.parked, {}
        for slot, given in states.items():
            name, state = self.slot_name(slot), self.state_of(slot)
            home = self.home(slot)
            taken[slot] = Assignment(name, state, home, given, parked, whole=whole)
        for slot, assignment in taken.items():
            assignment.write()
            self.memory_moved(slot)
            if assignment.stays and not self._told_of_host:
                self._told_of_host = True
                warn(
                    f"optimizer.state: {self.slot_name(slot)} ({', '.join(assignment.stays)}) was "
                    "assigned on an accelerator, but is stored on the host: the values were "
                    "copied, and the state stays on the host. Remove the code that moves optimizer "
                    "state to the accelerator, or lower offload_fraction"
                )

    @in_own_modes
    def reset_states(self, slots: Sequence[Slot]) -> None:
        """Set the state of some slots to its values before the first step. Main params keep their
        values.

        Moments and step counts become zero, and averages start again with the next step.

        Args:
            slots: the parameters.

        Raises:
            BrokenOffError: the last step or load was interrupted.
        """
        self.step_mark.check("state")
        self.make_current(follow_only=True)
        for slot in slots:
            state = self.state_of(slot)
            state.store.reset_state(state.slot)

    @in_own_modes
    def offload_to_cpu(self) -> None:
        """Move main params and moments to host memory, until :meth:`restore_from_cpu`.

        A step raises RuntimeError while the tensors are in host memory. Gradients are not freed.
        """
        # Announce the write to background saves first. Otherwise a background save would keep the
        # accelerator's memory.
        self.step_mark.open_state()
        for slot in self.slots():
            self.step_mark.parked.park(self.state_of(slot).live().values())
        self.memory_moved()

    @in_own_modes
    def restore_from_cpu(self) -> None:
        """Move main params and moments from host memory back to their accelerators, after
        :meth:`offload_to_cpu` or an assignment to ``optimizer.state``. Offloaded state stays
        in host memory."""
        self.step_mark.parked.restore()
        self.memory_moved()

    # -- torch's contract -----------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles: a copy would share main params and state with the original.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled; build another optimizer for the "
            "copied model, and call its load_state_dict(optimizer.state_dict())"
        )

    @property  # type: ignore[override]
    def state(self) -> SlotStateView:
        """The state of each parameter, as a mapping from parameters to dicts. The mapping is a
        view, so each lookup reads the present state."""
        return SlotStateView(self)

    @state.setter
    def state(self, value: Mapping[Tensor, dict[str, Any]]) -> None:
        # torch's constructor assigns an empty dict, which must not reset any state.
        if value or self._sizes:
            self.state.assign(value)

    def slot_name(self, slot: Slot) -> str:
        """Return the FQN of a slot, for messages and checkpoints."""
        return slot_name(self.param_groups, slot)

    def slots(self) -> list[Slot]:
        """Return all slots in order.

        Raises:
            ValueError: the caller edited the lists of groups or parameters.
        """
        self.check_lists()
        return [slot for slot, _ in iter_slots(self.param_groups)]

    @in_own_modes
    def init_state(self) -> None:
        """Allocate the state of every slot without stepping."""
        self.allocate_state(self.slots())

    @in_own_modes
    def state_dict(self, *, full_precision: bool = False) -> dict[str, Any]:
        """Return the state and settings: ``{"state": {index: {...}}, "param_groups": [...]}``.

        State tensors are the tensors that steps write, as in torch. Clone or save these tensors
        before the next step. Settings are copies.

        Two kinds of tensors are copies: 4-bit moments (in FP32), and 16-bit remainders if
        ``torch.distributed`` is initialized (in int32, because collectives do not support int16).

        Args:
            full_precision: True for FP32 copies of all state that is stored in fewer bits.

        Raises:
            BrokenOffError: the last step or load was interrupted.
        """
        read = self.full_slot_state if full_precision else self.slot_state
        return self._dict_of(read, has_checksums=not full_precision)

    @in_own_modes
    def settings_dict(self) -> dict[str, Any]:
        """Return :meth:`state_dict` with an empty ``"state"``. Post-hooks that callers registered
        still get a complete state dict."""
        if self._optimizer_state_dict_post_hooks:
            return {**self.state_dict(), "state": {}}
        return self._dict_of(lambda _: {}, has_checksums=True)

    def _dict_of(self, read: Callable[[Slot], State], *, has_checksums: bool) -> dict[str, Any]:
        self.step_mark.check("state_dict")
        self.check_lists()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self.share_settings()
        groups = renamed_groups(plain_groups(self.param_groups), self.model_parallel.names)
        self.init_state()
        states = map(read, self.slots())
        result: dict[str, Any] = {
            "state": {index: carried(state) for index, state in enumerate(states) if state},
            "param_groups": groups,
        }
        checksums = iter(self.param_checksums() if has_checksums else ())
        for group in groups if has_checksums else ():
            of_group = list(islice(checksums, len(group["params"])))
            if any(value is not None for value in of_group):
                group[CHECKSUMS] = of_group
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            hooked = post_hook(self, result)
            result = result if hooked is None else hooked
        return {**result, **self.extra_entries()}

    def load_state_dict(self, state_dict: dict[str, Any], *, convert: bool = False) -> None:
        """Load a state dict that :meth:`state_dict` returned. Parameters are matched by FQN if both
        sides have names, else by position.

        State is copied into the existing tensors, so placement and dtypes stay as configured.
        Settings are copied, and the argument is not modified. All checks precede the first write,
        so a refused state dict changes nothing.

        Load the model's weights first. If a parameter differs from its loaded main param (rounded),
        the parameter is overwritten, with a warning. A remainder (lower bits of a main param)
        is valid only with the weights with which it was saved. If the model has other weights, the
        first step or read of state raises.

        Args:
            state_dict: a state dict of this package.
            convert: True to round saved state to the configured dtypes even if bits are lost.
                Remainders are then accepted with any weights, and the present loss scale is kept if
                no loss scale was saved.

        Raises:
            ValueError: a parameter or its state is missing on either side, a shape or dtype does
                not fit, or bits would be lost. Or a setting, a step count or the loss scale is out
                of range.
        """
        if written := load_checked(self, state_dict, convert=convert):
            warn(
                f"{len(written)} parameters did not have the values of the loaded main params, "
                f"and were overwritten with these values: {names_in_words(written)}. Load all of "
                "the model's weights before the optimizer's state"
            )

    # -- overridden by subclasses, for loading ----------------------------------------------------

    def make_current(self, slot: Slot | None = None, *, follow_only: bool = False) -> None:
        """Prepare the state of a slot for a caller who may write to it.

        1. Announce the write to background saves, and refresh main params whose model parameters
           other code has modified.
        2. Create main params of newly trained parameters, and check loaded remainders.

        Args:
            slot: the parameter; None for all.
            follow_only: True for step 1 only, if the caller reads no state or loads all state.

        Raises:
            ValueError: a loaded remainder does not belong to its parameter's value; the message has
                the names.
        """
        self.step_mark.open_state()

    def drops_all_state(self, state_dict: Mapping[str, Any]) -> bool:
        """Drop all state if the state dict has no state.

        Args:
            state_dict: the state dict to load.

        Returns:
            True if the state was dropped. In this class always False, because an optimizer without
            deferred construction has state from the start.
        """
        return False

    def extra_entries(self) -> dict[str, Any]:
        """Return entries of a state dict in addition to state and param groups."""
        return {}

    def check_extra_entries(self, state_dict: Mapping[str, Any], *, convert: bool) -> None:
        """Raise ValueError unless :meth:`load_extra_entries` can load the state dict. Write
        nothing.

        Args:
            state_dict: the saved state dict.
            convert: True to keep the present loss scale if no loss scale was saved.
        """

    def load_extra_entries(self, state_dict: Mapping[str, Any]) -> None:
        """Load the entries that :meth:`extra_entries` returned."""

    def param_checksums(self) -> list[int | None]:
        """Return, for every slot, a checksum of the parameter with which its remainder is valid.

        The checksum is None for a slot without a remainder, or if this rank has only a part of the
        parameter.
        """
        return [None] * len(self.slots())


# -- loading a state dict: check all of it before the first write ---------------------------------


@in_own_modes
def load_checked(
    optimizer: SlotKeyedOptimizer, state_dict: dict[str, Any], *, convert: bool = False
) -> list[str]:
    """Load a state dict, as ``load_state_dict`` does, but do not warn of overwritten parameters.

    Returns:
        The names of the parameters that were overwritten with the loaded main params.
    """
    optimizer.step_mark.check_lent("load_state_dict")
    optimizer.check_lists()
    check_is_state_dict(state_dict)
    state_dict = dict(state_dict)
    if optimizer.step_mark.is_set:
        optimizer.recover()
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        hooked = pre_hook(optimizer, state_dict)
        state_dict = state_dict if hooked is None else hooked
    check_is_state_dict(state_dict)
    written: list[str] = []
    if not optimizer.drops_all_state(state_dict):
        # Exchange settings first, because settings decide which state exists.
        optimizer.share_settings()
        optimizer.make_current(follow_only=True)
        match = match_without_state(optimizer, state_dict, convert=convert)
        load = StateLoad(match, state_dict["state"], optimizer.state_of, convert)
        with optimizer.step_mark.step(optimizer, is_load=True):
            load.write()
            match.write_settings(optimizer.param_groups)
            optimizer.share_settings()
            optimizer.load_extra_entries(state_dict)
            written = load.write_model()
        # Warn last: if warnings are errors, the load is complete by then.
        if names := load.without_average:
            warn(
                f"the saved state has no average for {len(names)} parameters, and ema_decay is "
                f"set: {names_in_words(names)}. Their averages start from the loaded main params"
            )
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
    return written


def match_without_state(
    optimizer: SlotKeyedOptimizer, state_dict: Mapping[str, Any], *, convert: bool = False
) -> GroupMatch:
    """Match saved parameters and settings to live ones, without reading state.

    Args:
        optimizer: the optimizer to load.
        state_dict: the saved state dict.
        convert: True to accept a state dict without a loss scale.

    Raises:
        ValueError: parameters are missing on either side, or a setting or the loss scale is out of
            range.
    """
    live, names = optimizer.param_groups, optimizer.model_parallel.names
    saved = names.groups_in(state_dict["param_groups"], live)
    match = checked_match(live, saved, optimizer.check_settings)
    optimizer.check_extra_entries(state_dict, convert=convert)
    return match
