"""Windows of a step: slots with streamed state, or with state in a file, are stepped window by
window.

A window is filled in the order of the launches. A tensor that fits into a window is never cut. A
larger tensor is cut at blocks of 256 elements if its rule allows cuts, and at multiples of these
blocks if its state is in a file.

The storage (:mod:`~mp_optim.offload.state_storage`) has the windows in host memory. The windows are
stepped there (:class:`HostWindows`), or in a ring of device memory (:class:`DeviceRing`), which
copies windows to the device and back.

For each window the pipeline calls these methods of :class:`HostWindows` or :class:`DeviceRing`:

- ``bring`` starts to copy the window, and returns the tensors that will be stepped.
- ``arrive`` waits until the copy is complete.
- ``send_back`` starts to copy the stepped tensors back.
- ``wait_for`` waits until the window ``lag`` positions earlier is copied back, because the next
  window takes the memory of that window.

``wait`` waits until all copies are complete. ``up`` and ``down`` count bytes that were copied
between accelerator and host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mp_optim.core import CachedTensorList, Slot, SlotUpdates
from mp_optim.core.slot_state import AVERAGE, REMAINDER
from mp_optim.host.host_memory import ALIGNMENT, TensorSpec, aligned_bytes
from mp_optim.host.transfer import Transfer
from mp_optim.kernels.chunking import part_of_state
from mp_optim.kernels.kernel_args import MAIN, TensorLists
from mp_optim.offload.buckets import WAIT_COPIES, DiskBytes, HostBytes, HostSlot, TransferBytes
from mp_optim.offload.settings import HostStepSettings
from mp_optim.offload.state_storage import (
    GRAD,
    IN_FLIGHT,
    OUTPUT,
    SMALLEST_WINDOW,
    FileStorage,
    MemoryStorage,
    OpenWindows,
    Piece,
    Storage,
    Tensors,
    Window,
    blocks_bytes,
    view_of,
)
from mp_optim.rules.rule import Launch
from mp_optim.rules.rule_executor import RuleExecutor


class WindowPipeline:
    """Steps slots in windows of a storage, on the host or on the device.

    Args:
        executor: executor of the slots.
        settings: place, memory and copies of the steps.
        label: function that returns a label for some slots, for errors and the timeline.
        slots: the slots.
        carries_grads: True if gradients of streamed slots may be in host memory.

    Attributes:
        moved: bytes that steps copied, until the caller resets this attribute.

    Raises:
        ValueError: a slot that cannot be cut is larger than a window.
    """

    def __init__(
        self,
        executor: RuleExecutor,
        settings: HostStepSettings,
        label: Callable[[Sequence[Slot]], str],
        slots: Sequence[HostSlot],
        carries_grads: bool,
    ) -> None:
        self._executor, self._label = executor, label
        self._is_host = settings.place == "host"
        self._stage = "host_step" if self._is_host else "stream_step"
        self._slots, self._carries_grads = slots, carries_grads
        self._in_place = {slot.slot for slot in slots if slot.is_stepped_in_place}
        self._transfer, self._timeline = settings.transfer, settings.timeline
        self._most = settings.window_bytes
        self.moved = TransferBytes()
        self.storage: Storage = MemoryStorage()
        if settings.state_file is not None:
            self.storage = FileStorage(
                settings.state_file,
                self._transfer,
                settings.pin_mains,
                self._timeline,
                self._is_host,
            )
        if self._most < SMALLEST_WINDOW:
            raise ValueError(
                f"stream_window_bytes={self._most}: must be at least {SMALLEST_WINDOW}"
            )
        largest = max(slots, key=self._smallest, default=None)
        if largest is not None and (size := self._smallest(largest)) > self._most:
            name, what = executor.slot_name(largest.slot), "the smallest part of"
            if not self._may_cut(largest.slot):
                group = executor.param_groups[largest.slot.group]
                what = f"{group.get('optimizer', executor.rule.name)} needs whole parameters, and"
            raise ValueError(
                f"stream_window_bytes={self._most}: {what} {name} needs {size} bytes; set "
                f"stream_window_bytes={size} or more"
            )

    # -- memory -----------------------------------------------------------------------------------

    def _may_cut(self, slot: Slot) -> bool:
        return self._executor.is_elementwise(self._executor.param_groups[slot.group])

    def _along_bytes(self, slot: HostSlot, numel: int) -> int:
        """Return the bytes of gradient and output of some elements in a window, for the widest
        dtypes.

        A gradient may be FP32, and on the host a window has outputs, too. Plans have this space on
        any device.
        """
        if not (self._is_host or self._carries_grads):
            return 0
        size = aligned_bytes(numel, torch.float32)
        return size + aligned_bytes(numel, slot.dtype) if self._is_host else size

    def _slot_bytes(self, slot: HostSlot) -> int:
        size = self.storage.form.forms_bytes(held_forms(self._executor, slot).values())
        return size + self._along_bytes(slot, slot.numel)

    def _smallest(self, slot: HostSlot) -> int:
        """Return the bytes of the smallest number of elements of a slot that can be stepped
        alone."""
        whole = self._slot_bytes(slot)
        if not self._may_cut(slot.slot):
            return whole
        forms = held_forms(self._executor, slot).items()
        elements, size = self.storage.form.cuts({key: dtype for key, (_, dtype) in forms})
        return min(whole, size + self._along_bytes(slot, elements))

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each window that is in memory at the same time."""
        slots = list(map(self._slot_bytes, self._slots))
        least = max(map(self._smallest, self._slots), default=0)
        lag = HostWindows.lag if self._is_host else DeviceRing.lag
        return self.storage.window_sizes(slots, least, self._most, lag)

    def host_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each piece of host memory that windows take."""
        return self.storage.host_bytes(self.sizes) if self._slots else ()

    def note(self) -> str:
        """Return a note for ``describe()`` about how the slots are stepped."""
        count, sizes = len(self._slots), self.sizes
        if isinstance(self.storage, MemoryStorage):
            return (
                f"streamed: {count} parameters are stepped on the device from host memory, in "
                f"windows of {sizes[0]:,} bytes, {len(sizes)} at a time in step()"
            )
        size = sum(disk_bytes(self._executor, self._slots))
        return (
            f"on disk: main params and state of {count} parameters, {size:,} bytes, are in an "
            f"unnamed temporary file in {self.storage.file.folder} (not a checkpoint), and are "
            f"stepped on the {'host' if self._is_host else 'device'} in windows of {sizes[0]:,} "
            f"bytes, {len(sizes)} at a time in host memory"
        )

    # -- in step ----------------------------------------------------------------------------------

    def steps(
        self, updates: SlotUpdates, on_host: Collection[Slot], step_device: Callable[[], None]
    ) -> None:
        """Step the slots window by window.

        Args:
            updates: updates of the slots.
            on_host: slots whose gradients are in host memory.
            step_device: function that steps the device's slots; called once, before the first
                window is stepped.
        """
        launches = self._executor.plan(updates)
        windows: list[Window] = []
        filled = 0
        for piece in self._pieces(launches, on_host):
            if not windows or filled + piece.num_bytes > self.sizes[0]:
                windows.append([])
                filled = 0
            windows[-1].append(piece)
            filled += piece.num_bytes
        if not windows:
            step_device()
            return
        copies: WindowCopies = HostWindows(self._transfer, windows)
        if not self._is_host:
            like, slot, output = updates.grads[0], updates.slots[0], updates.outputs[0]
            if slot in on_host:
                like = self._executor.stepped(slot) if output is None else output
            copies = DeviceRing(self._transfer, self.sizes[:IN_FLIGHT], like)
        opened = self.storage.open_windows(windows, self.sizes)
        try:
            self._stream(launches, len(windows), opened, copies, step_device)
            for number in range(max(0, len(windows) - copies.lag), len(windows)):
                opened.write_window(number)
        finally:
            # NOTE: the disk reads and writes the host memory of the windows until here.
            opened.close_windows()
        for launch in launches:
            launch.copy_back()
            self._executor.rows.groups[launch.group].count(launch.positions)
        self.moved.add(copies.down, copies.up, opened.read, opened.written)

    def _pieces(self, launches: Sequence[Launch], on_host: Collection[Slot]) -> Iterator[Piece]:
        """Yield the tensors of a step in the order of the launches. A tensor that does not fit into
        a window is cut.

        Raises:
            ValueError: a tensor or its smallest piece is larger than a window; the message has its
                bytes.
        """
        form, most = self.storage.form, self.sizes[0]
        for number, planned in enumerate(launches):
            for index, main in enumerate(planned.lists.main):
                held = {key: tensors[index] for key, tensors in planned.lists.state.items()}
                if planned.updates.slots[index] not in self._in_place:
                    held = {MAIN: main, **held}
                extra = self._along(on_host, planned, index)
                size = form.bytes_of(held, extra)
                if size <= most:
                    yield Piece(number, index, 0, main.numel(), True, held, extra, size)
                    continue
                if not self._executor.is_elementwise(planned.settings):
                    raise ValueError(
                        f"stream_window_bytes={most}: a parameter of {tuple(main.shape)}, which "
                        f"its rule steps only as a whole, needs {size} bytes; set "
                        f"stream_window_bytes={size} or more. No parameter was stepped"
                    )
                elements, num_bytes = form.cuts({key: each.dtype for key, each in held.items()})
                num_bytes += sum(elements * each.itemsize for each in extra.values())
                # Leave space for the alignment of each tensor.
                ends = form.unit * (len(held) + len(extra)) if form.unit == ALIGNMENT else 0
                limit = max(1, (most - ends) // num_bytes) * elements
                for start in range(0, main.numel(), limit):
                    count = min(limit, main.numel() - start)
                    parts = cut_all(held, start, count), cut_all(extra, start, count)
                    size = form.bytes_of(*parts)
                    if size > most:
                        raise ValueError(
                            f"stream_window_bytes={most}: the smallest piece of a parameter with a "
                            f"gradient in {extra[GRAD].dtype} needs {size} bytes; set "
                            f"stream_window_bytes={size} or more. No parameter was stepped"
                        )
                    yield Piece(number, index, start, count, False, *parts, size)

    def _along(self, on_host: Collection[Slot], launch: Launch, index: int) -> Tensors:
        """Return the gradient and output of a launch's tensor that are copied with its window."""
        grad, output = launch.lists.grad[index], launch.lists.output[index]
        is_down = launch.updates.slots[index] in on_host
        if not self._is_host:
            return {GRAD: grad} if is_down else {}
        if self._transfer.is_same_place:
            return {}
        written = {} if output is None else {OUTPUT: output}
        return written if is_down else {GRAD: grad, **written}

    def _stream(
        self,
        launches: Sequence[Launch],
        count: int,
        opened: OpenWindows,
        copies: WindowCopies,
        step_device: Callable[[], None],
    ) -> None:
        """Step all windows of a step, each while the next window is copied. ``step_device`` is
        called before the first window is stepped."""
        try:
            coming = opened.read_window(0)
            if isinstance(copies, HostWindows):
                resident = copies.bring(coming)
                step_device()
            else:
                # NOTE: uploads to the device run in order. So upload the scalars that the device's
                # steps read before the first window. Queued behind the window, they would arrive
                # only after all of its bytes, and the steps would wait.
                step_device()
                for launch in launches:
                    self._executor.announce(launch, copies.device)
                resident = copies.bring(coming)
            self._executor.step_mark.touch()
            for number in range(count):
                window, stepped = coming, resident
                if (before := number - copies.lag) >= 0:
                    with self._timeline.stage(WAIT_COPIES):
                        copies.wait_for(before)
                    opened.write_window(before)
                copies.arrive()
                if number + 1 < count:
                    coming = opened.read_window(number + 1)
                    resident = copies.bring(coming)
                slots = [launches[p.launch].updates.slots[p.index] for p in window]
                with self._timeline.stage(self._stage, self._label(slots)):
                    for launch in launches_of(launches, window, stepped):
                        self._executor.carry_out(launch)
                copies.send_back(number, window, stepped)
        finally:
            # NOTE: copies read and write host and device memory of the windows until here.
            with self._timeline.stage(WAIT_COPIES):
                copies.wait()


# -- windows --------------------------------------------------------------------------------------


def cut_all(tensors: Tensors, start: int, count: int) -> Tensors:
    """Return views of some elements of each tensor."""
    return {key: part_of_state(key, each, start, count) for key, each in tensors.items()}


def launches_of(
    launches: Sequence[Launch], window: Window, resident: Sequence[Tensors]
) -> Iterator[Launch]:
    """Yield the launches of a window.

    Args:
        launches: the launches of the step.
        window: pieces of the window.
        resident: main param, state, gradient and output of each piece, on the stepping device.
    """
    pairs = zip(window, resident, strict=True)
    for launch, run in groupby(pairs, key=lambda pair: pair[0].launch):
        planned, members = launches[launch], list(run)
        lists, indices = planned.lists, [piece.index for piece, _ in members]
        grads, outputs, mains, noise = [], [], [], []
        for piece, here in members:
            output = lists.output[piece.index]
            mains.append(_or_part(here.get(MAIN), lists.main[piece.index], piece))
            grads.append(_or_part(here.get(GRAD), lists.grad[piece.index], piece))
            outputs.append(output if output is None else _or_part(here.get(OUTPUT), output, piece))
            if lists.noise:
                of_tensor = lists.noise[piece.index]
                noise.append(replace(of_tensor, start=of_tensor.start + piece.start))
        main = CachedTensorList(mains)
        yield planned._replace(
            positions=[planned.positions[index] for index in indices],
            regions=[planned.regions[index] for index in indices],
            device=main[0].device,
            updates=planned.updates.take(indices),
            mains=main,
            outputs=outputs,
            lists=TensorLists(
                main,
                CachedTensorList(grads),
                {key: [tensors[key] for _, tensors in members] for key in lists.state},
                outputs,
                noise=noise or None,
                average_weight=lists.average_weight,
                follows=lists.follows and not any(OUTPUT in here for _, here in members),
            ),
            firsts=[piece.start for piece, _ in members],
        )


def _or_part(came: Tensor | None, tensor: Tensor, piece: Piece) -> Tensor:
    """Return the copied tensor; without a copy, the piece's elements of the tensor itself."""
    if came is not None:
        return came
    return tensor if piece.is_whole else part_of_state(MAIN, tensor, piece.start, piece.count)


# -- bytes of state -------------------------------------------------------------------------------


def held_forms(executor: RuleExecutor, slot: HostSlot) -> dict[str, TensorSpec]:
    """Return the shapes and dtypes of a slot's stored tensors: state, and the main param unless
    the main param is on the device."""
    forms = executor.rows.specs(slot.slot)
    if slot.is_stepped_in_place:
        del forms[MAIN]
    return forms


def state_bytes(executor: RuleExecutor, slots: Iterable[HostSlot]) -> HostBytes:
    """Return the host memory of the state of some slots. Each kind of state is one piece."""
    sizes: Counter[str] = Counter()
    for slot in slots:
        for key, (shape, dtype) in held_forms(executor, slot).items():
            sizes[key] += aligned_bytes(shape.numel(), dtype)
    others = (MAIN, REMAINDER, AVERAGE)
    return HostBytes(
        (),
        moments=tuple(size for key, size in sizes.items() if key not in others),
        remainders=tuple(sizes[key] for key in (REMAINDER,) if key in sizes),
        averages=tuple(sizes[key] for key in (AVERAGE,) if key in sizes),
    )


_KINDS = {MAIN: "main_params", REMAINDER: "main_params", AVERAGE: "averages"}


def disk_bytes(executor: RuleExecutor, slots: Iterable[HostSlot]) -> DiskBytes:
    """Return the bytes of main params and state of some slots in the file."""
    sizes: Counter[str] = Counter()
    for slot in slots:
        for key, (shape, dtype) in held_forms(executor, slot).items():
            sizes[_KINDS.get(key, "moments")] += blocks_bytes(shape.numel() * dtype.itemsize)
    return DiskBytes(**sizes)


class HostWindows:
    """Steps windows in host memory. Gradients are copied from the device, and parameters to the
    device.

    Args:
        transfer: interface for copies.
        windows: the windows of the step, with gradients and outputs on the device.
    """

    lag = 1

    def __init__(self, transfer: Transfer, windows: Sequence[Window]) -> None:
        self._transfer, self._windows = transfer, windows
        self._coming: list[Any] = []
        self._going: dict[int, Any] = {}
        self._brought = 0
        self.up = self.down = 0

    def bring(self, window: Window) -> list[Tensors]:
        grads = _along(self._windows[self._brought], GRAD)
        if grads:
            ticket = self._transfer.download(_along(window, GRAD), grads)
            self._coming.append(ticket)
            self.down += sum(grad.nbytes for grad in grads)
        self._brought += 1
        return [{**piece.held, **piece.along} for piece in window]

    def arrive(self) -> None:
        while self._coming:
            ticket = self._coming.pop()
            self._transfer.wait(ticket)

    def send_back(self, number: int, window: Window, resident: Sequence[Tensors]) -> None:
        outputs = _along(self._windows[number], OUTPUT)
        if outputs:
            self._going[number] = self._transfer.upload(outputs, _along(window, OUTPUT))
            self.up += sum(output.nbytes for output in outputs)

    def wait_for(self, number: int) -> None:
        if number in self._going:
            self._transfer.wait(self._going.pop(number))

    def wait(self) -> None:
        self.arrive()
        for number in list(self._going):
            self.wait_for(number)


def _along(window: Window, key: str) -> list[Tensor]:
    return [piece.along[key] for piece in window if key in piece.along]


class DeviceRing:
    """Steps windows in device memory. Gradients of a window are in host memory until the window is
    copied.

    NOTE: on the device, an upload waits only for operations queued before the ring was made, so
    uploads overlap with all steps. Before an upload starts, ``wait_for`` has waited until the
    former contents of its device memory are on the host. Downloads are complete after :meth:`wait`.

    Args:
        transfer: interface for copies.
        sizes: bytes of each window's memory, which is freed with the ring.
        like: a tensor on the device.

    Attributes:
        device: the device of the windows.
    """

    lag = IN_FLIGHT - 1

    def __init__(self, transfer: Transfer, sizes: Sequence[int], like: Tensor) -> None:
        self._transfer = transfer
        self._memories = [like.new_empty(size, dtype=torch.uint8) for size in sizes]
        # Tickets of the copies that use each window's memory.
        self._tickets: list[list[Any]] = [[] for _ in sizes]
        self.device, self._made = like.device, transfer.mark()
        self._uploads = 0
        self.up = self.down = 0

    def bring(self, window: Window) -> list[Tensors]:
        turn = self._uploads % len(self._memories)
        self._uploads += 1
        memory, used = self._memories[turn], 0
        resident: list[Tensors] = []
        for piece in window:
            tensors = {}
            for key, each in (*piece.held.items(), *piece.along.items()):
                tensors[key] = view_of(memory, used, (each.shape, each.dtype))
                used += aligned_bytes(each.numel(), each.dtype)
            resident.append(tensors)
        sources = _tensors([{**piece.held, **piece.along} for piece in window])
        ticket = self._transfer.upload(_tensors(resident), sources, self._made)
        self._tickets[turn].append(ticket)
        self.up += sum(tensor.nbytes for tensor in sources)
        return resident

    def arrive(self) -> None:
        self._transfer.join()

    def send_back(self, number: int, window: Window, resident: Sequence[Tensors]) -> None:
        held = _tensors([piece.held for piece in window])
        pairs = zip(window, resident, strict=True)
        stepped = [tensors[key] for piece, tensors in pairs for key in piece.held]
        ticket = self._transfer.download(held, stepped)
        self._tickets[number % len(self._memories)].append(ticket)
        self.down += sum(tensor.nbytes for tensor in held)

    def wait_for(self, number: int) -> None:
        tickets = self._tickets[number % len(self._memories)]
        while tickets:
            ticket = tickets.pop()
            self._transfer.wait(ticket)

    def wait(self) -> None:
        for number in range(len(self._memories)):
            self.wait_for(number)


def _tensors(of_pieces: Sequence[Tensors]) -> list[Tensor]:
    return [tensor for tensors in of_pieces for tensor in tensors.values()]


WindowCopies = HostWindows | DeviceRing
