"""The consistency flag of an optimizer stack, and tensors that are moved to the host between steps.

A signal or an error in a kernel may end a step between two parameters. Parameters that were stepped
in place cannot be restored, so the next step, ``state_dict`` or save raises. ``load_state_dict``
makes the optimizer consistent again.

While other code needs the accelerator's memory, main params and state are moved to the host: all of
them by ``offload_to_cpu()``, or single tensors by assignments to ``optimizer.state``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident

import torch
from torch import Tensor

from mp_optim.host.accelerator import accelerator_of
from mp_optim.host.leases import before_writing_all, borrows, give_memory, wait_for_devices


class BrokenOffError(RuntimeError):
    """A step, a load or ``scale_rows_`` was interrupted, so some parameters are changed and others
    are not."""


_PARKED = (
    "step(): the optimizer is offloaded (by offload_to_cpu(), or by a CPU tensor assigned to "
    "optimizer.state[param][key]); call restore_from_cpu() before step()"
)


class StepMark:
    """The consistency flag of all layers of a stack, for the life of the outermost optimizer.

    NOTE: code calls :meth:`touch`, in the thread of the step, before it writes main params, state,
    model parameters or the loss scale. Writes to back buffers need no call, because no other code
    reads back buffers.

    Attributes:
        is_set: True from the first write of a step or load until the step or load is complete;
            stays True after an interrupt.
        parked: tensors that are moved to the host; steps raise until the tensors are restored.
        plan_key: cache key of all data that steps reuse, compared by identity; a new object makes
            the cached data stale.
        refusal: reason why steps, saves and loads raise RuntimeError now; empty if they are
            allowed.
    """

    def __init__(self) -> None:
        self.parked = ParkedTensors()
        self.invalidate_plans()
        self.is_set = False
        self._why = self.refusal = ""
        self._writer: tuple[object, int] | None = None
        """The outermost layer and the id of its thread, during a step or load; else None."""

    def touch(self) -> None:
        """Mark the stack as inconsistent until the step or load is complete.

        Waits until background saves have copied the accelerator memory that the saves still read.
        This method does not wait for saves of host memory, because kernel launches do so
        themselves.
        """
        self.is_set = True
        if borrows:
            wait_for_devices()

    def invalidate_plans(self) -> None:
        """Make all data stale that steps have cached. Called after slots, their tensors, places or
        buckets changed."""
        self.plan_key = object()

    def open_state(self) -> None:
        """Prepare for writes to any state, by this package or by a caller.

        State that a background save has not read yet is copied, and the save reads the copy. All
        writers of state call this method first, except the kernel launches of a step.
        """
        before_writing_all()

    def break_off(self, why: Exception) -> None:
        """Mark the stack as inconsistent, because an earlier step was found to be wrong."""
        self.is_set, self._why = True, repr(why)

    def clear(self) -> None:
        """Allow steps again, after everything was loaded or rebuilt."""
        self.is_set, self._why, self._writer = False, "", None

    @contextmanager
    def lent(self, borrower: str) -> Iterator[None]:
        """Return a context in which steps, saves and loads raise, because the model's weights are
        replaced for a while.

        Args:
            borrower: name of the optimizer's method that replaced the weights.
        """
        self.check(borrower)
        self.refusal = (
            f"inside `with optimizer.{borrower}()` the model does not have its training weights; "
            "leave the block first"
        )
        try:
            yield
        finally:
            self.refusal = ""

    def check_lent(self, doing: str) -> None:
        """Raise RuntimeError if :attr:`refusal` is set, for example because the model's weights are
        replaced (:meth:`lent`), or if another thread is inside a step or load.

        Args:
            doing: name of the refused call, for the message.
        """
        if self.refusal:
            raise RuntimeError(f"{doing}: {self.refusal}")
        if self._writer is not None and self._writer[1] != get_ident():
            raise _under_way(doing, "another thread")

    def check(self, doing: str) -> None:
        """Raise if a step was interrupted or is under way, or if :attr:`refusal` is set.

        Args:
            doing: name of the refused call, for the message.

        Raises:
            BrokenOffError: an earlier step, load or ``scale_rows_`` was interrupted.
            RuntimeError: a step or load is under way, or :attr:`refusal` is set.
        """
        self.check_lent(doing)
        if self.is_set and self._writer is not None:
            raise _under_way(doing, "this thread")
        if self.is_set:
            raise BrokenOffError(
                f"{doing}: an earlier step, load or scaling of this optimizer was "
                f"interrupted{self._why and f' by {self._why}'}, so some parameters are changed "
                "and others are not. Load the last checkpoint of model and optimizer "
                "(load_state_dict makes the optimizer usable again)"
            )

    @contextmanager
    def step(self, layer: object, *, is_load: bool = False) -> Iterator[None]:
        """Return a context for all writes of a step, a load or ``scale_rows_``. If the block ends
        without an error, the stack is consistent again. Nested calls of lower layers do nothing.

        Args:
            layer: the optimizer of the stack that steps.
            is_load: True for a load. After a load the stack is consistent, even if an earlier step
                was interrupted.

        Raises:
            BrokenOffError: an earlier step was interrupted, and this is not a load.
            RuntimeError: main params or state are moved to the host, another step is under way, or
                :attr:`refusal` is set.
        """
        outermost, thread = self._writer or (layer, 0)
        if outermost is not layer and thread == get_ident():
            yield
            return
        if not is_load:
            if self.refusal or self.is_set or self._writer is not None:
                self.check("step")
            if self.parked.homes:
                raise RuntimeError(_PARKED)
        try:
            try:
                self._writer = layer, get_ident()
                if is_load:
                    self.touch()
                yield
            except BaseException as error:
                self._why = repr(error)
                raise
            finally:
                self._writer = None
        finally:
            # Assign None again, because an interrupt may come before the first assignment.
            self._writer = None
        # If an interrupt comes before this line, the flag stays set, so the next step raises.
        self.is_set, self._why = False, ""


def _under_way(doing: str, who: str) -> RuntimeError:
    return RuntimeError(
        f"{doing}: {who} is still inside a step or load of this optimizer; call {doing} after "
        "that step or load (use a lock around both calls, or a flag that the training loop "
        "checks between steps)"
    )


HOST = torch.device("cpu")


class ParkedTensors:
    """Tensors that were moved to the host in place, and their former devices. Other references to a
    tensor stay valid, because the tensor stays the same object.

    Attributes:
        homes: by ``id`` of a tensor, a weak reference to the tensor, and its former device.
    """

    def __init__(self) -> None:
        self.homes: dict[int, tuple[weakref.ref[Tensor], torch.device]] = {}

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors on accelerators to the host."""
        for tensor in tensors:
            if tensor.device != HOST:
                self.give(tensor, tensor.data.cpu())

    def restore(self) -> None:
        """Move all tensors back to their former devices."""
        for reference, home in list(self.homes.values()):
            if (tensor := reference()) is not None:
                self.give(tensor, tensor.data.to(home))
        self.homes.clear()

    def give(self, tensor: Tensor, memory: Tensor) -> None:
        """Replace a tensor's memory, and with it the values and possibly the device.

        Args:
            tensor: the tensor; stays the same object.
            memory: a tensor with the new memory, of the same shape and dtype.
        """
        before = tensor.device
        give_memory(tensor, memory)
        if memory.device != HOST:
            self.homes.pop(id(tensor), None)
        elif before != HOST:
            key, homes = id(tensor), self.homes
            homes[key] = weakref.ref(tensor, lambda _: homes.pop(key, None)), before


def wait_for(device: torch.device) -> None:
    """Wait for all work that the calling thread queued on the current stream of a device. For the
    host, return at once.

    Call this before reading host memory that an asynchronous copy writes, because such a read does
    not wait for the device.
    """
    if (accelerator := accelerator_of(device)) is not None:
        with accelerator.on(device):
            accelerator.current_stream().synchronize()
