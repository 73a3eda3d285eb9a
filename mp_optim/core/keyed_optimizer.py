"""The common shape of every optimizer in this package: a torch optimizer whose state is kept by
slot; and how such state is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mp_optim.core import ParamGroups, Slot, iter_slots, param_at, slot_name
from mp_optim.core.executor import Executor, Mode
from mp_optim.core.identity import SharedSettings, check_assigned, check_lists, make_plain, sizes_of
from mp_optim.core.interrupted_step import StepMark
from mp_optim.core.model_parallel import ModelParallel
from mp_optim.core.names import names_in_words
from mp_optim.core.slot_state import SlotState, State, scale_key
from mp_optim.core.state_dict import (
    CHECKSUMS,
    GroupMatch,
    StateLoad,
    carried,
    check_is_state_dict,
    checked_match,
    plain_groups,
)
from mp_optim.core.state_view import Assignment, Lookups, SlotStateView
from mp_optim.core.tensors import device_of
from mp_optim.host.calls import in_own_modes, warn

Closure = Callable[[], Any]


class SlotKeyedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose state is keyed by ``(group, position)``.

    Subclasses differ in where a slot's state is: in an executor, or in members. How state is shown,
    saved, matched and loaded is the same.
    """

    executor: Executor
    """What steps, of one that has no members for it."""
    _live_groups: ParamGroups
    """The groups, one list for the optimizer's life. A subclass sets it before this constructor, as
    torch's constructor assigns and fills ``param_groups``."""
    _sizes: list[int]
    """The number of parameters of each group, set by a subclass as ``_live_groups`` is; empty until
    :meth:`lists_are_known`."""
    groups_below: Sequence[ParamGroups] = ()
    """Groups of what steps for this optimizer, each list with a group for each of its own."""
    grad_scaler: Any = None
    """The loss scale, of an optimizer that has one."""
    model_parallel: ModelParallel = ModelParallel()
    """What of the model this rank has. What leaves (state dicts, checkpoints) has the names of the
    whole model; groups and messages have those here."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._state_lookups = Lookups()
        self._told_of_host = False
        self.step_mark = StepMark()
        self.shared_settings = SharedSettings()
        make_plain(defaults)
        super().__init__(params, defaults)

    # -- what the executor answers, or a subclass ------------------------------------------------

    def state_of(self, slot: Slot) -> SlotState:
        """A slot's state as this layer shows and loads it."""
        return self.executor.state_of(slot)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        """Allocate the state of some slots together."""
        self.executor.allocate_state(slots)

    def home(self, slot: Slot) -> torch.device:
        """Where a slot is stepped, from memory there: its parameter's device, or the host."""
        return self.executor.home(slot, param_at(self.param_groups, slot))

    def memory_moved(self, slot: Slot | None = None) -> None:
        """Main params and state, of a slot or of any, were given other memory."""
        self.executor.memory_moved(slot)

    def check_settings(self, group: dict[str, Any]) -> None:
        """Raise ValueError naming a setting of a param group, and its value, if it cannot be
        stepped with."""
        self.executor.check_settings(group)

    # -- param groups -----------------------------------------------------------------------------

    @property
    def _knows_lists(self) -> bool:
        """True after :meth:`lists_are_known`: not within torch's constructor, and not before the
        first step of an optimizer whose lists may be edited until then."""
        return bool(self._sizes)

    @property
    def param_groups(self) -> ParamGroups:
        """Groups of the parameters that are there now. The list stays the same object; another one
        that is assigned gives it its groups."""
        return self._live_groups

    @param_groups.setter
    def param_groups(self, groups: ParamGroups) -> None:
        if self._knows_lists:
            check_assigned(self._live_groups, groups, self.defaults)
        self._live_groups[:] = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Where it is refused, nothing is changed.

        Raises:
            TypeError, ValueError: what is wrong with a parameter or setting.
            RuntimeError: inside of ``averaged_weights()``.
        """
        self.step_mark.check_lent("add_param_group")
        make_plain(param_group)
        super().add_param_group(param_group)
        self.lists_are_known()

    @contextmanager
    def added_whole(self) -> Iterator[None]:
        """A group is added inside, here and below: all of it, or nothing where something raises."""
        self.check_lists()
        count = len(self.param_groups)
        try:
            yield
        except BaseException:
            self.forget_groups(count)
            raise

    def lists_are_known(self) -> None:
        """There are as many groups, and parameters in them, as there should be."""
        self._sizes[:] = sizes_of(self.param_groups)

    def has_edited_lists(self) -> bool:
        """Whether groups, or parameters in them, were added or taken away by editing the lists."""
        return sizes_of(self.param_groups) != self._sizes

    def check_lists(self) -> None:
        """Raise ValueError if groups, or parameters in them, were added or taken away by editing
        the lists, naming the first group."""
        check_lists(self._live_groups, self._sizes)

    def _checked_groups(self) -> ParamGroups:
        self.check_lists()
        return self.param_groups

    def forget_groups(self, count: int) -> None:
        """Take back groups that were added after the first ``count``, however far adding them had
        come."""
        del self.param_groups[count:]
        self.shared_settings.forget_groups(count)
        self.lists_are_known()

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return device_of(self.param_groups)

    # -- steps that were broken off ---------------------------------------------------------------

    def use_mark(self, mark: StepMark) -> None:
        """Tell of broken-off steps by this mark, which belongs to the layer above."""
        self.step_mark = mark
        self.executor.use_mark(mark)

    def recover(self) -> None:
        """A step was broken off: forget what it left under way. Values are loaded after this."""
        self.executor.recover()

    # -- what is below ----------------------------------------------------------------------------

    def share_settings(self) -> None:
        """Make settings here and below the same: what was changed in one since the last time is
        changed in the others, so that optimizers that write into their own groups go on from there.

        Raises:
            ValueError: two optimizers below wrote different values for one group, naming them.
        """
        self.shared_settings.exchange(self._live_groups, self.groups_below)

    @property
    def has_modes(self) -> bool:
        """Whether an optimizer below has other weights for evaluation (``train()`` and ``eval()``,
        as those of Schedule-Free have)."""
        return self.executor.has_modes

    def switch_mode(self, mode: Mode) -> None:
        """Let optimizers below switch, and follow the weights that they write."""
        self.share_settings()
        with self.step_mark.step(self):
            self.step_mark.touch()
            self.executor.switch_mode(mode)
        self.share_settings()

    @in_own_modes
    def train(self) -> None:
        """The weights that are trained, if an optimizer below has others for evaluation; else
        nothing."""
        if self.has_modes:
            self.switch_mode("train")

    @in_own_modes
    def eval(self) -> None:
        """The weights to evaluate and keep, if an optimizer below has such; else nothing. Call
        :meth:`train` before the next step."""
        if self.has_modes:
            self.switch_mode("eval")

    # -- state ------------------------------------------------------------------------------------

    def slot_state(self, slot: Slot) -> State:
        """The state tensors of a slot as state dicts have them, allocated if they did not exist:
        the live ones, and FP32 copies of 4-bit moments. :meth:`shown_state` gives copies that may
        be written."""
        self.make_current(slot)
        self.step_mark.copies.take_edits()
        return self.state_of(slot).exported()

    @in_own_modes
    def shown_state(self, slot: Slot) -> State:
        """The state of a slot as :attr:`state` shows it: the live tensors, and FP32 copies of those
        that are stored in blocks. Writes to both count."""
        self.make_current(slot)
        state = self.state_of(slot)
        shown = self.step_mark.copies.show(
            self,
            self.slot_name(slot),
            state.coded(),
            lambda key, leaf: state.layout.show({key: leaf})[key],
            scale_key,
        )
        saved = state.exported()  # its keys are those of a state dict, as torch's functions expect
        return {key: shown.get(key, value) for key, value in saved.items()}

    def full_slot_state(self, slot: Slot) -> State:
        """The slot's state with everything in FP32, copied where it is stored in fewer bits."""
        self.make_current(slot)
        self.step_mark.copies.take_edits()
        return self.state_of(slot).full_precision()

    def load_slot_state(self, slot: Slot, state: State) -> None:
        """Copy a saved state into the slot.

        Raises:
            ValueError: a key is missing or unknown, a value does not fit, or bits would be lost.
        """
        self.make_current(slot, follow_only=True)
        self.step_mark.copies.take_edits()
        own = self.state_of(slot)
        own.load(own.fit(state))
        self.step_mark.copies.refresh()

    def has_slot_state(self, slot: Slot) -> bool:
        """Whether a slot has any state."""
        self.make_current(slot)
        return bool(self.state_of(slot).live())

    @in_own_modes
    def assign_states(self, states: Mapping[Slot, State], *, whole: bool) -> None:
        """Take what was put into slots' state by hand (:mod:`~mp_optim.core.state_view`); nothing
        if some of it does not fit.

        Args:
            whole: all of these slots' state is given.
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
                    f"state of {self.slot_name(slot)} ({', '.join(assignment.stays)}) was given on "
                    "an accelerator, and stays on the host, where it is stepped: its values were "
                    "taken. Nothing of it needs to be moved; switch off what moves optimizer state "
                    "in this program, or place less on the host"
                )
        self.step_mark.copies.refresh()

    @in_own_modes
    def reset_states(self, slots: Sequence[Slot]) -> None:
        """Have slots begin again, as before the first step: moments are zero, no step is counted,
        averages begin with the next step. Main params keep their values.

        Raises:
            BrokenOffError: the last step or load was broken off half-way.
        """
        self.step_mark.check("state")
        self.make_current(follow_only=True)
        for slot in slots:
            self.state_of(slot).reset()
        self.step_mark.copies.refresh()

    @in_own_modes
    def offload_to_cpu(self) -> None:
        """Move main params and moments off the accelerator, until :meth:`restore_from_cpu`; a step
        before that raises RuntimeError. Gradients are the caller's to clear."""
        self.step_mark.open_state()  # a save would keep the accelerator's memory
        for slot in self.slots():
            self.step_mark.parked.park(self.state_of(slot).live().values())
        self.memory_moved()

    @in_own_modes
    def restore_from_cpu(self) -> None:
        """Undo :meth:`offload_to_cpu`, and what was moved to the host by ``optimizer.state``; what
        is stepped on the host stays there."""
        self.step_mark.parked.restore()
        self.memory_moved()

    # -- torch's contract -----------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy would share main params and state with the original.

        Raises:
            TypeError: always; copy ``state_dict()`` instead.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled; build another one for the copied "
            "model and give it load_state_dict(optimizer.state_dict())"
        )

    @property  # type: ignore[override]
    def state(self) -> SlotStateView:
        """Current tensors to their state; a view, complete whenever it is looked at."""
        return SlotStateView(
            self._checked_groups,
            self.has_slot_state,
            self.shown_state,
            self.assign_states,
            self.reset_states,
            self._state_lookups,
        )

    @state.setter
    def state(self, value: Mapping[Tensor, dict[str, Any]]) -> None:
        if value or self._knows_lists:  # torch's constructor assigns an empty one
            self.state.assign(value)

    def slot_name(self, slot: Slot) -> str:
        """FQN of a slot, for messages and checkpoints."""
        return slot_name(self.param_groups, slot)

    def slots(self) -> list[Slot]:
        """All slots in order.

        Raises:
            ValueError: the lists of groups and parameters were edited.
        """
        self.check_lists()
        return [slot for slot, _ in iter_slots(self.param_groups)]

    @in_own_modes
    def init_state(self) -> None:
        """Allocate the state of every slot without stepping."""
        self.allocate_state(self.slots())

    @in_own_modes
    def state_dict(self, *, full_precision: bool = False) -> dict[str, Any]:
        """Torch-shaped and plain: ``{"state": {index: {...}}, "param_groups": [...]}``.

        State tensors are the live ones, as torch's are: clone (or save) before the next step. 4-bit
        moments are FP32 copies; where ``torch.distributed`` is initialised 16-bit remainders are
        copies of 32 bits, as no collective carries 16-bit integers.
        Settings are copies.

        Args:
            full_precision: state that is stored in fewer bits as FP32 copies instead.

        Raises:
            BrokenOffError: the last step or load was broken off half-way.
        """
        read = self.full_slot_state if full_precision else self.slot_state
        return self._dict_of(read, has_checksums=not full_precision)

    @in_own_modes
    def settings_dict(self) -> dict[str, Any]:
        """:meth:`state_dict` without state, which hooks for state dicts get to see all the same."""
        if self._optimizer_state_dict_post_hooks:
            return {**self.state_dict(), "state": {}}
        return self._dict_of(lambda _: {}, has_checksums=True)

    def _dict_of(self, read: Callable[[Slot], State], *, has_checksums: bool) -> dict[str, Any]:
        self.step_mark.check("state_dict")
        self.check_lists()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self.share_settings()
        groups = self.model_parallel.names.groups_out(plain_groups(self.param_groups))
        self.init_state()
        states = map(read, self.slots())
        result: dict[str, Any] = {
            "state": {index: carried(state) for index, state in enumerate(states) if state},
            "param_groups": groups,
        }
        if has_checksums:
            _add_checksums(groups, self.param_checksums())
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            hooked = post_hook(self, result)
            result = result if hooked is None else hooked
        return {**result, **self.saved_beside()}

    def load_state_dict(self, state_dict: dict[str, Any], *, convert: bool = False) -> None:
        """Load what :meth:`state_dict` made: by FQN where both sides have names, else by position.

        State is copied into the tensors that exist, so placement and dtypes stay what they are
        configured to be, and settings are copied. The argument is not modified. Nothing is written
        before everything has been checked, so what is refused has changed nothing.

        A parameter that does not round to the main param loaded for it is written from it, with a
        warning: load the model's weights first. A remainder belongs to the weights it was saved
        with; if others are there when it is first used (by a step, or by reading state), that
        raises.

        Args:
            convert: round saved state to the dtypes configured here also where that loses bits;
                take a remainder beside any weights; keep the present loss scale if none was saved.

        Raises:
            ValueError: a parameter or its state is missing on either side, a tensor's shape or
                dtype does not fit, a setting, step or loss scale is out of range, or bits would be
                lost.
        """
        if written := load_checked(self, state_dict, convert=convert):
            warn(
                f"{len(written)} parameters did not have the values of the loaded main params, and "
                f"were written from them: {names_in_words(written)}. Were all of the model's "
                "weights loaded? (Where they are loaded after the optimizer's state, load them "
                "before it.)"
            )

    # -- what loading asks of a subclass ----------------------------------------------------------

    def make_current(self, slot: Slot | None = None, *, follow_only: bool = False) -> None:
        """Prepare the state of one slot, or of all, for a caller who may write to it.

        The order is: open the state for writing, let main params follow a model that other code
        wrote, give newly trained parameters main params, check loaded remainders.

        Args:
            follow_only: do only the first two: nothing is read, or all of it is going to be loaded.

        Raises:
            ValueError: a loaded remainder is next to a parameter that it was not saved with,
                naming the parameters.
        """
        self.step_mark.open_state()

    def begins_anew(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether loading this means to forget all state; it is forgotten then."""
        return False

    def saved_beside(self) -> dict[str, Any]:
        """What a state dict holds beside slots and groups."""
        return {}

    def check_beside(self, state_dict: Mapping[str, Any], *, convert: bool) -> None:
        """Raise ValueError unless :meth:`load_beside` can load this; write nothing.

        Args:
            convert: keep the present loss scale if none was saved.
        """

    def load_beside(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`saved_beside` made."""

    def param_checksums(self) -> list[int | None]:
        """For every slot, a checksum of the parameter that its remainder belongs to; None if there
        is no remainder, or this rank does not have all of the parameter."""
        return [None] * len(self.slots())


@runtime_checkable
class OverStack(Protocol):
    """A torch optimizer that has a stack below."""

    @property
    def stack(self) -> SlotKeyedOptimizer: ...


def stack_of(optimizer: Any) -> Any:
    """The stack below an optimizer, if it is over one; else what is given."""
    return optimizer.stack if isinstance(optimizer, OverStack) else optimizer


def _add_checksums(groups: Sequence[dict[str, Any]], checksums: Sequence[int | None]) -> None:
    left = iter(checksums)
    for group in groups:
        of_group = list(islice(left, len(group["params"])))
        if any(value is not None for value in of_group):
            group[CHECKSUMS] = of_group


# -- loading a state dict: all of it is checked before anything is written ------------------------


@in_own_modes
def load_checked(
    optimizer: SlotKeyedOptimizer, state_dict: dict[str, Any], *, convert: bool = False
) -> list[str]:
    """As ``load_state_dict``; returns the names of the parameters that were written, instead of
    warning."""
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
    if optimizer.begins_anew(state_dict):
        written: list[str] = []
    else:
        written = _restore_state(optimizer, state_dict, convert)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
    return written


def _restore_state(
    optimizer: SlotKeyedOptimizer, state_dict: dict[str, Any], convert: bool
) -> list[str]:
    optimizer.share_settings()  # which say what state there is
    optimizer.make_current(follow_only=True)
    match = match_without_state(optimizer, state_dict, convert=convert)
    load = StateLoad(match, state_dict["state"], optimizer.state_of, convert)
    load.check()
    with optimizer.step_mark.load(optimizer):
        load.write()
        match.write_settings(optimizer.param_groups)
        optimizer.share_settings()
        optimizer.load_beside(state_dict)
        written = load.write_model()
    load.tell_of_averages()  # where warnings are errors, after everything
    return written


def match_without_state(
    optimizer: SlotKeyedOptimizer, state_dict: Mapping[str, Any], *, convert: bool = False
) -> GroupMatch:
    """What can be said of a state dict without its state: which parameters and settings go where.

    Raises:
        ValueError: parameters are missing on either side, or a setting or the loss scale is out of
            range.
    """
    live, names = optimizer.param_groups, optimizer.model_parallel.names
    saved = names.groups_in(state_dict["param_groups"], live)
    match = checked_match(live, saved, optimizer.check_settings)
    optimizer.check_beside(state_dict, convert=convert)
    return match
