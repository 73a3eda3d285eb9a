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

from collections.abc import Callable, Sequence
from functools import partial

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
    for rest in (row, values[words * _WORD :]):
        if rest.numel():
            sums[: rest.numel()] += rest
    return sums


class StagedBytes:
    """Bytes that are on their way from an accelerator, to be read once from the first to the last.

    Attributes:
        nbytes: how many there are.
    """

    def __init__(self, nbytes: int, arrive: Callable[[], Tensor]) -> None:
        self.nbytes, self._read = nbytes, 0
        self._arrive: Callable[[], Tensor] | None = arrive
        self._memory: Tensor | None = None

    def read_into(self, to: Tensor) -> None:
        """Read the next bytes, as many as ``to`` has, which lies on the host.

        Raises:
            RuntimeError: they could not be brought here, or are not those of the call.
        """
        if self._memory is None:
            assert self._arrive is not None
            self._memory, self._arrive = self._arrive(), None
        move(to, self._memory[self._read : self._read + to.nbytes])
        self._read += to.nbytes
        if self._read == self.nbytes:
            self._memory = None


class _OfDevice:
    """What one save borrows of one accelerator.

    NOTE: readers hold this object until they have read, and what it holds of leases would stay as
    long: it keeps those of sums and small tensors alone.
    """

    def __init__(self) -> None:
        self._leases: list[DeviceLease] = []
        self._sums: list[Tensor] = []
        self._small: list[Tensor] = []
        self._used = 0
        self._lease_of_sums: list[DeviceLease] = []
        self._lease_of_small: list[DeviceLease] = []

    def lend_state(self, tensor: Tensor, what: str) -> StagedBytes:
        """See :class:`DeviceLoans`."""
        lease = self._new_lease(tensor)
        return StagedBytes(lease.nbytes, partial(self._unwritten, lease, what))

    def lend_param(self, tensor: Tensor, what: str) -> StagedBytes:
        """See :class:`DeviceLoans`."""
        lease, number = self._new_lease(tensor), len(self._sums)
        assert lease.source is not None
        self._sums.append(sums_of_bits(lease.source))
        return StagedBytes(lease.nbytes, partial(self._unchanged, lease, number, what))

    def copy_small(self, tensor: Tensor) -> StagedBytes:
        """See :class:`DeviceLoans`."""
        first, self._used = self._used, self._used + tensor.nbytes
        self._small.append(tensor.detach().reshape(-1).view(torch.uint8))
        return StagedBytes(tensor.nbytes, partial(self._beside, first, self._used))

    def _new_lease(self, tensor: Tensor) -> DeviceLease:
        self._leases.append(DeviceLease(tensor))
        return self._leases[-1]

    def stage(self, device: torch.device, take: Take) -> Staging:
        """Begin to bring everything down."""
        self._lease_of_sums = _together(self._sums)
        self._lease_of_small = _together(self._small)
        every = [*self._lease_of_sums, *self._lease_of_small, *self._leases]
        self._leases, self._sums, self._small = [], [], []
        self.staging = Staging(windows_of(device), every, take)
        return self.staging

    # -- what has arrived, for readers ------------------------------------------------------------

    def _beside(self, first: int, end: int) -> Tensor:
        (lease,) = self._lease_of_small
        return self.staging.bytes_of(lease)[first:end]

    def _unwritten(self, lease: DeviceLease, what: str) -> Tensor:
        memory = self.staging.bytes_of(lease)
        if lease.is_written:
            raise written_by_others(what)
        return memory

    def _unchanged(self, lease: DeviceLease, number: int, what: str) -> Tensor:
        memory = self.staging.bytes_of(lease)
        (sums,) = self._lease_of_sums
        at_the_call = self.staging.bytes_of(sums).view(torch.int64).view(-1, _COLUMNS)
        if not torch.equal(sums_of_bits(memory), at_the_call[number]):
            raise RuntimeError(
                f"{what} was written while a save in the background still copied it from the "
                "device, and neither by the optimizer nor by torch's; before you write the "
                "model's parameters yourself, call wait_for_device() of the save's handle"
            )
        return memory


def _together(tensors: Sequence[Tensor]) -> list[DeviceLease]:
    """A lease of a copy of these, one after the other; none of no tensors."""
    return [DeviceLease(torch.cat(list(tensors)))] if tensors else []


class DeviceLoans:
    """What one save borrows of accelerators.

    The thread that trains lends tensors and calls :meth:`start`; from then on any thread calls.
    """

    def __init__(self) -> None:
        self._by_device: dict[torch.device, _OfDevice] = {}
        self._stagings: list[Staging] = []

    def lend_state(self, tensor: Tensor, what: str) -> StagedBytes:
        """Borrow a contiguous tensor that only the optimizer writes, which says so first; ``what``
        it is, for an error."""
        return self._of(tensor).lend_state(tensor, what)

    def lend_param(self, tensor: Tensor, what: str) -> StagedBytes:
        """Borrow a contiguous tensor that anybody may write; it begins at an address that is a
        multiple of 8."""
        return self._of(tensor).lend_param(tensor, what)

    def copy_small(self, tensor: Tensor) -> StagedBytes:
        """Copy a tensor on its device, together with others."""
        return self._of(tensor).copy_small(tensor)

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
