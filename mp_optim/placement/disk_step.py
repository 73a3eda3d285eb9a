"""Steps slots whose main params and state are kept in a file (``optimizer_state_path``), on the
device or on the host.

A window is read from the file into host memory, stepped there or on the device, and written back;
the next is read and the one before is written at the same time. Host memory is then only windows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from mp_optim.placement.disk_windows import DiskForm, DiskWindows, cuts, windows_held
from mp_optim.placement.host_bytes import DiskBytes, HostBytes, HostSlot
from mp_optim.placement.host_windows import HostWindows
from mp_optim.placement.state_file import StateFile, blocks_bytes
from mp_optim.placement.streamed_step import StreamedStepper
from mp_optim.placement.timeline import WAIT_DISK
from mp_optim.placement.window_ring import SteppingPlace, WindowRing
from mp_optim.placement.window_source import WindowSource
from mp_optim.placement.windows import IN_FLIGHT, Window
from mp_optim.process.direct_file import BLOCK
from mp_optim.process.host_memory import aligned_bytes
from mp_optim.slots import Slot
from mp_optim.slots.host_part import Place
from mp_optim.slots.state_keys import AVERAGE, REMAINDER
from mp_optim.update.kernel_args import MAIN

_KINDS = {MAIN: "main_params", REMAINDER: "main_params", AVERAGE: "averages"}


class StreamedFromDisk(StreamedStepper):
    """Streams slots from the file through host memory to the device and back."""

    lag = WindowRing.lag

    @property
    def _file(self) -> StateFile:
        assert self.settings.state_file is not None
        return self.settings.state_file

    def _cut(self, slots: Sequence[HostSlot]) -> None:
        super()._cut(slots)
        self._memory: Tensor | None = None
        self._check_parts_fit()
        self._rule.allocate_by(self._file.zeros)
        self._file.reserve(sum(self.disk_bytes()))

    # -- memory -----------------------------------------------------------------------------------

    def _form(self) -> DiskForm:
        return DiskForm(is_staged=False)

    def _beside_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """What comes along with some elements of a parameter, at most."""
        return 0

    def _slot_bytes(self, slot: Slot) -> int:
        known = self._slots[slot]
        return super()._slot_bytes(slot) + self._beside_bytes(known.numel, known.dtype)

    def _smallest(self, slot: Slot) -> int:
        """Bytes of the smallest part of a slot that can be stepped by itself."""
        whole = self._slot_bytes(slot)
        if not self._may_cut(slot):
            return whole
        forms = self._rule.forms(slot).items()
        elements, size = cuts({key: dtype for key, (_, dtype) in forms})
        return min(whole, size + self._beside_bytes(elements, self._slots[slot].dtype))

    def _check_parts_fit(self) -> None:
        for slot in self._slots:
            if (size := self._smallest(slot)) > self._most:
                raise ValueError(
                    f"stream_window_bytes={self._most}: with optimizer_state_path windows are "
                    "whole blocks of the disk, and the smallest part of "
                    f"{self._rule.slot_name(slot)} takes {size} bytes; set stream_window_bytes to "
                    "at least that"
                )

    def _ring_sizes(self) -> list[int]:
        """Bytes of each window in host memory: as allowed, and together about as much as there
        is, if that is less."""
        if not self._sizes:
            count = windows_held(self.lag)
            share = -(-sum(map(self._slot_bytes, self._slots)) // count)
            least = max(map(self._smallest, self._slots), default=0)
            wanted = blocks_bytes(max(share, least, BLOCK))
            self._sizes = [min(self._most // BLOCK * BLOCK, wanted)] * count
        return self._sizes

    def _device_sizes(self) -> list[int]:
        return self._ring_sizes()[:IN_FLIGHT]

    @property
    def device_bytes(self) -> int:
        return sum(self._device_sizes()) if self._slots else 0

    def host_bytes(self) -> HostBytes:
        return HostBytes((), windows=(self._memory_bytes(),) if self._slots else ())

    def _memory_bytes(self) -> int:
        """Bytes of all windows, and what it takes to begin them with a block."""
        return sum(self._ring_sizes()) + BLOCK

    def _lanes(self) -> list[Tensor]:
        """Memory for each window; kept from one step to the next."""
        sizes = self._ring_sizes()
        if self._memory is None:
            pin = self.settings.pin_mains
            self._memory = self.transfer.empty_host(self._memory_bytes(), pin)
        begin = -self._memory.data_ptr() % BLOCK
        return list(torch.split(self._memory[begin:][: sum(sizes)], sizes))

    def disk_bytes(self) -> DiskBytes:
        sizes: Counter[str] = Counter()
        for slot in self._slots:
            for key, (shape, dtype) in self._rule.forms(slot).items():
                sizes[_KINDS.get(key, "moments")] += blocks_bytes(
                    shape.numel() * dtype.itemsize
                )
        return DiskBytes(**sizes)

    # -- in step ----------------------------------------------------------------------------------

    def state_exposed(self, slot: Slot) -> None:
        self._file.exposed()

    def _window_source(self, windows: Sequence[Window]) -> WindowSource:
        self._file.settle()
        return DiskWindows(self._file, windows, self._lanes(), self.timeline)

    def _stepping_place(self, windows: Sequence[Window], like: Tensor) -> SteppingPlace:
        return WindowRing(self.transfer, self._device_sizes(), like)

    # -- what it says of itself -------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        notes = (*self._file.notes(), *self.transfer.notes())
        return (self._said(), *notes) if self._slots else notes

    def _said(self) -> str:
        sizes, disk = self._ring_sizes(), sum(self.disk_bytes())
        place = "host" if self.lag == HostWindows.lag else "device"
        return (
            f"on disk: main params and state of {len(self._slots)} parameters, {disk:,} bytes, lie "
            f"in a file in {self._file.folder}, which has no name and is no checkpoint, and are "
            f"stepped on the {place} in windows of {sizes[0]:,} bytes, {len(sizes)} at a time in "
            "host memory"
        )

    def metrics(self) -> dict[str, float]:
        moved = self.transfer_bytes
        return {
            **super().metrics(),
            "bytes_read": moved.read,
            "bytes_written": moved.written,
            "disk_wait_ms": self.timeline.milliseconds(WAIT_DISK),
        }


class SteppedFromDisk(StreamedFromDisk):
    """Steps windows of the file on the host; gradients come to them from the device, if it is not
    the host, and parameters go there."""

    stage = "host_step"
    lag = HostWindows.lag

    def place_of(self, slot: Slot) -> Place:
        return "host"

    def _form(self) -> DiskForm:
        return DiskForm(is_staged=not self.transfer.is_same_place)

    def _beside_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """A gradient in FP32, and an output; room for them is planned on any device."""
        return aligned_bytes(numel, torch.float32) + aligned_bytes(numel, dtype)

    def _device_sizes(self) -> list[int]:
        return []

    def _stepping_place(self, windows: Sequence[Window], like: Tensor) -> SteppingPlace:
        return HostWindows(self.transfer, windows)
