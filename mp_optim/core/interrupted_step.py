"""What a step finds changed, and does not go on from: a step that was broken off half-way, and
tensors that wait on the host.

A signal, or an error in a kernel, may end a step between two parameters. What is stepped in place
cannot be taken back, so the next step, ``state_dict`` or save raises instead; ``load_state_dict``
makes the optimizer whole again.

Main params and state wait there while something else needs the accelerator's memory: all of them
(``offload_to_cpu``), or what was moved by hand (``optimizer.state``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident

import torch
from torch import Tensor

from mp_optim.core.shown_copies import ShownCopies
from mp_optim.host.accelerator import accelerator_of
from mp_optim.host.leases import before_writing_all, borrows, give_memory, wait_for_devices


class BrokenOffError(RuntimeError):
    """A step, load or scaling was broken off: some parameters have taken it, others have not."""


_PARKED = (
    "the optimizer is offloaded: call restore_from_cpu() before step() (which also brings home "
    "what was moved to the host by optimizer.state[param][key] = ...)"
)


class StepMark:
    """The consistency flag of all layers of a stack, for the life of the outermost optimizer.

    NOTE: code that writes main params, state, model parameters or the loss scale in a step, or
    scales rows, calls :meth:`touch` first, in the thread of the step. Back buffers, which nothing
    reads, need no mark.

    Attributes:
        is_set: True from the first write of a step or load until it is complete.
        parked: tensors that wait on the host; meanwhile nothing is stepped.
        copies: of state, which callers may have edited.
    """

    def __init__(self) -> None:
        self.parked = ParkedTensors()
        self.copies = ShownCopies()
        self.is_set = False
        self._why = self._lent_to = ""
        self._writer: tuple[object, int] | None = None  # the outermost layer, and its thread

    def touch(self) -> None:
        """Announce writes that are complete only when the step is. Waits until background saves
        have copied what they borrow of accelerators; launches announce the host's memory."""
        self.is_set = True
        if borrows:
            wait_for_devices()

    def open_state(self) -> None:
        """Announce that any state may be written, here or by the caller who is given it: the one
        door for everything except the launches of a step. Background saves read a copy from here
        on."""
        before_writing_all()

    def _take_edits(self) -> None:
        self.open_state()
        self.copies.take_edits()

    def break_off(self, why: Exception) -> None:
        """Refuse further steps: an earlier one is found to be wrong."""
        self.is_set, self._why = True, repr(why)

    def clear(self) -> None:
        """Allow steps again: everything was loaded, or is built again."""
        self.is_set, self._why, self._writer = False, "", None

    @contextmanager
    def lent(self, borrower: str) -> Iterator[None]:
        """Refuse steps, saves and loads while the model has other weights.

        Args:
            borrower: the optimizer's method that gives it those.
        """
        self.check(borrower)
        self._lent_to = borrower
        try:
            yield
        finally:
            self._lent_to = ""

    def check_lent(self, doing: str) -> None:
        """Raise RuntimeError if the model has other weights now, or another thread is inside of a
        step or load."""
        if self._lent_to:
            raise RuntimeError(
                f"{doing}: inside of `with optimizer.{self._lent_to}()`, where the model's weights "
                "are not those that are trained; do it after the block"
            )
        if self._writer is None:
            if self.copies.shown:
                self._take_edits()
        elif self._writer[1] != get_ident():
            raise _under_way(doing, "another thread")

    def check(self, doing: str) -> None:
        """Raise BrokenOffError if a step was broken off, and RuntimeError if one is under way, or
        the model has other weights now."""
        self.check_lent(doing)
        if self.is_set and self._writer is not None:
            raise _under_way(doing, "this thread")
        if self.is_set:
            raise BrokenOffError(
                f"{doing}: an earlier step, load or scaling of this optimizer was broken off "
                f"half-way{self._why and f' by {self._why}'}, so that some parameters have taken "
                "it and others have not. Load the last checkpoint, model and optimizer "
                "(load_state_dict makes the optimizer usable again)"
            )

    @contextmanager
    def _writing(self, layer: object) -> Iterator[None]:
        if self.copies.shown:
            self._take_edits()
        self._writer = layer, get_ident()
        try:
            yield
        except BaseException as error:
            self._why = repr(error)
            raise
        finally:
            self._writer = None
            if self.copies.shown:
                self.copies.refresh()

    @contextmanager
    def step(self, layer: object) -> Iterator[None]:
        """Mark a step of a layer, or rows that are scaled: of the outermost layer, all of it.

        Raises:
            BrokenOffError: one before it was broken off.
            RuntimeError: main params or state wait on the host.
        """
        outermost, thread = self._writer or (layer, 0)
        if outermost is not layer and thread == get_ident():
            yield
            return
        if self._lent_to or self.is_set or self._writer is not None:
            self.check("step")
        if self.parked.homes:
            raise RuntimeError(_PARKED)
        with self._writing(layer):
            yield
        # In this order: an interrupt between the two leaves the mark, which is safe.
        self.is_set = False

    @contextmanager
    def load(self, layer: object) -> Iterator[None]:
        """Mark a load by a layer, which makes the stack consistent again."""
        with self._writing(layer):
            self.touch()
            yield
        self.clear()


def _under_way(doing: str, who: str) -> RuntimeError:
    return RuntimeError(
        f"{doing}: {who} is inside of a step or load of this optimizer, which is not complete; "
        "do it after that (a lock around both, or a flag that the training loop looks at "
        "between steps)"
    )


HOST = torch.device("cpu")


class ParkedTensors:
    """Tensors that were given memory of the host, and where they are at home. They stay the same
    objects, so nothing that holds them has to know.

    Attributes:
        homes: by ``id`` of a tensor, itself and its home. A tensor that is gone is not kept.
    """

    def __init__(self) -> None:
        self.homes: dict[int, tuple[weakref.ref[Tensor], torch.device]] = {}

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Move those that are on an accelerator to the host."""
        for tensor in tensors:
            if tensor.device != HOST:
                self.give(tensor, tensor.data.cpu())

    def restore(self) -> None:
        """Move all of them home."""
        for reference, home in list(self.homes.values()):
            if (tensor := reference()) is not None:
                self.give(tensor, tensor.data.to(home))
        self.homes.clear()

    def give(self, tensor: Tensor, memory: Tensor) -> None:
        """Have a tensor be in memory of another device; its values are what is there."""
        before = tensor.device
        give_memory(tensor, memory)
        if memory.device != HOST:
            self.homes.pop(id(tensor), None)
        elif before != HOST:
            self.homes[id(tensor)] = self._when_gone(tensor), before

    def home_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor came from that waits here; of any other, where it is."""
        parked = self.homes.get(id(tensor))
        return tensor.device if parked is None else parked[1]

    def _when_gone(self, tensor: Tensor) -> weakref.ref[Tensor]:
        key, homes = id(tensor), self.homes
        return weakref.ref(tensor, lambda _: homes.pop(key, None))


def wait_for(device: torch.device) -> None:
    """Wait for what the calling thread has queued on a device, as are copies that were begun
    without waiting: who reads the host's memory asks no device. Nothing for the host."""
    if (accelerator := accelerator_of(device)) is not None:
        with accelerator.on(device):
            accelerator.current_stream().synchronize()
