"""Memory of accelerators that a save in the background still has to read: lent, and brought to the
host while training goes on.

The call only notes which tensors there are; :mod:`~mp_optim.process.device_staging` copies them.
Whoever writes memory of an accelerator waits for the rest of the copies first
(:meth:`DeviceLoans.wait`). A copy on the device in place of that wait would take memory where there
is none to spare. NOTE: it is the host that waits, so kernels that are queued afterwards come after
the copies, in whatever stream.

State is written by this package, which says so first; torch's version counter tells whether
somebody else did. Parameters of the model are written by anybody, and often without a trace
(``.data``, kernels of others, CUDA graphs): what came down is compared with sums of the bits at the
call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mp_optim.process.device_staging import (
    DeviceLease,
    Staging,
    Take,
    move,
    windows_of,
    written_by_others,
)

_COLUMNS = 256
_WORD = 8


def sums_of_bits(values: Tensor) -> Tensor:
    """The 8-byte words added up in columns: int64, shape (256,), without a copy of the values.

    Args:
        values: 1-D uint8, from an address on that is a multiple of 8.
    """
    whole, words = values.numel() // (_WORD * _COLUMNS), values.numel() // _WORD
    table = values[: whole * _WORD * _COLUMNS].view(torch.int64).view(whole, _COLUMNS)
    sums = table.sum(0)
    row = values[whole * _WORD * _COLUMNS : words * _WORD].view(torch.int64)
    sums[: row.numel()] += row
    rest = values[words * _WORD :]
    sums[: rest.numel()] += rest
    return sums


class StagedBytes:
    """Bytes that are on their way from an accelerator, to be read once from the first to the last.

    Attributes:
        nbytes: how many there are.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._read = nbytes, 0
        self._memory: Tensor | None = None
        self._open: Callable[[], Tensor] | None = None

    def come_from(self, open_: Callable[[], Tensor]) -> None:
        """Have them read from what this returns, which waits for them."""
        self._open = open_

    def read_into(self, to: Tensor) -> None:
        """Read the next bytes, as many as ``to`` has, which lies on the host.

        Raises:
            RuntimeError: they could not be brought here, or are not those of the call.
        """
        if self._memory is None:
            assert self._open is not None
            self._memory, self._open = self._open(), None
        move(to, self._memory[self._read : self._read + to.nbytes])
        self._read += to.nbytes
        if self._read == self.nbytes:
            self._memory = None


class _OfDevice:
    """What is lent of one accelerator, before it is brought down.

    Attributes:
        state: tensors of the optimizer. params: of the model. small: of either.
    """

    def __init__(self) -> None:
        self.state: list[tuple[Tensor, str, StagedBytes]] = []
        self.params: list[tuple[Tensor, str, StagedBytes]] = []
        self.small: list[tuple[Tensor, StagedBytes]] = []

    def stage(self, device: torch.device, take: Take) -> Staging:
        """Begin to bring everything down."""
        packed = [t.detach().reshape(-1).view(torch.uint8) for t, _ in self.small]
        params = [DeviceLease(tensor) for tensor, _, _ in self.params]
        state = [DeviceLease(tensor) for tensor, _, _ in self.state]
        sums = []
        for lease in params:
            assert lease.source is not None
            sums.append(sums_of_bits(lease.source))
        own = [
            DeviceLease(torch.cat(some)) if some else None for some in (sums, packed)
        ]
        every = [lease for lease in (*own, *params, *state) if lease is not None]
        staging = Staging(windows_of(device), every, take)
        self._hand_out(staging, own[0], own[1], params, state)
        return staging

    def _hand_out(
        self,
        staging: Staging,
        sums: DeviceLease | None,
        packed: DeviceLease | None,
        params: Sequence[DeviceLease],
        state: Sequence[DeviceLease],
    ) -> None:
        ends = itertools.accumulate(reader.nbytes for _, reader in self.small)
        for (_, reader), end in zip(self.small, ends, strict=True):
            assert packed is not None
            reader.come_from(_slice_of(staging, packed, end - reader.nbytes, end))
        for number, (lease, (_, what, reader)) in enumerate(
            zip(params, self.params, strict=True)
        ):
            assert sums is not None
            reader.come_from(_compared(staging, lease, sums, number, what))
        for lease, (_, what, reader) in zip(state, self.state, strict=True):
            reader.come_from(_unwritten(staging, lease, what))


def _slice_of(
    staging: Staging, lease: DeviceLease, first: int, end: int
) -> Callable[[], Tensor]:
    return lambda: staging.bytes_of(lease)[first:end]


def _unwritten(staging: Staging, lease: DeviceLease, what: str) -> Callable[[], Tensor]:
    def open_() -> Tensor:
        memory = staging.bytes_of(lease)
        if lease.is_written:
            raise written_by_others(what)
        return memory

    return open_


def _compared(
    staging: Staging, lease: DeviceLease, sums: DeviceLease, number: int, what: str
) -> Callable[[], Tensor]:
    def open_() -> Tensor:
        memory = staging.bytes_of(lease)
        before = staging.bytes_of(sums).view(torch.int64).view(-1, _COLUMNS)[number]
        if not torch.equal(sums_of_bits(memory), before):
            raise RuntimeError(
                f"{what} was written while a save in the background still copied it from the "
                "device, and neither by the optimizer nor by torch's; before you write the "
                "model's parameters yourself, call wait_for_device() of the save's handle"
            )
        return memory

    return open_


class DeviceLoans:
    """What one save borrows of accelerators.

    The thread that trains adds tensors and calls :meth:`start`; from then on any thread calls.
    """

    def __init__(self) -> None:
        self._by_device: dict[torch.device, _OfDevice] = {}
        self._stagings: list[Staging] = []

    def lend_state(self, tensor: Tensor, what: str) -> StagedBytes:
        """Borrow a contiguous tensor that only the optimizer writes, which says so first; ``what``
        it is, for an error."""
        reader = StagedBytes(tensor.nbytes)
        self._of(tensor).state.append((tensor, what, reader))
        return reader

    def lend_param(self, tensor: Tensor, what: str) -> StagedBytes:
        """Borrow a contiguous tensor that anybody may write; it begins at an address that is a
        multiple of 8."""
        reader = StagedBytes(tensor.nbytes)
        self._of(tensor).params.append((tensor, what, reader))
        return reader

    def copy_small(self, tensor: Tensor) -> StagedBytes:
        """Copy a tensor on its device, together with others."""
        reader = StagedBytes(tensor.nbytes)
        self._of(tensor).small.append((tensor, reader))
        return reader

    def _of(self, tensor: Tensor) -> _OfDevice:
        return self._by_device.setdefault(tensor.device, _OfDevice())

    def start(self, take: Take) -> None:
        """Begin to bring everything down, after the work that is queued in the current streams."""
        by_device, self._by_device = self._by_device, {}
        for device, of_device in by_device.items():
            self._stagings.append(of_device.stage(device, take))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing of an accelerator is read any more (on each of them so many seconds at
        most); whether that is so."""
        waits = [staging.wait(timeout) for staging in self._stagings]
        return all(waits)

    def stop(self) -> None:
        """The save is over; what is on its way comes to its end by itself."""
        for staging in self._stagings:
            staging.stop(RuntimeError("the save is over"))
