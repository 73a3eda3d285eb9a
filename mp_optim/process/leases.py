"""Memory that a save in the background still has to read: lent, and copied just before something
writes it.

A save lends tensors of the optimizer's and reads them while training goes on. Whatever writes main
params or state says so first (:func:`before_writing`); what the save has not read by then is copied
for it. So the save reads the bits of its call, and a step pays for what is not written yet, and for
nothing if the save is further than that.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mp_optim.process import host_memory
from mp_optim.process.device_leases import DeviceLoans
from mp_optim.process.device_staging import version_of, written_by_others
from mp_optim.process.host_memory import Block, aligned_bytes, empty_host_tensor
from mp_optim.process.torch_modes import in_own_modes

_PIECE = 256 << 20
"""Bytes that are asked for at a time; what of them is not used takes no memory."""


class Copies:
    """Host memory for copies, cut from large pieces: many small ones cost several times as much
    when they are first written. A piece goes with the last copy in it."""

    def __init__(self) -> None:
        self._lock, self._block = threading.Lock(), Block(0)

    def take(self, num_bytes: int) -> Tensor:
        """So many bytes; any thread may call."""
        size = aligned_bytes(num_bytes, torch.uint8)
        with self._lock:
            if size > self._block.left:
                self._block = Block(max(size, _PIECE))
            return self._block.take(torch.Size([num_bytes]), torch.uint8)


class Lease:
    """The bytes of a contiguous tensor on the host as they are now, to be read once from the first
    to the last, whoever writes the tensor meanwhile.

    NOTE: the reader's thread reads, and a thread that is about to write copies, under one lock.
    While :attr:`_source` is the tensor's own memory nobody has written there since the lease began;
    :func:`before_writing` is how that is kept.

    Attributes:
        nbytes: how many there are.
        address, end: of the tensor's memory when the lease began.
        copied: of these, how many were copied because something was about to write them.
    """

    def __init__(self, tensor: Tensor, copies: Copies) -> None:
        self._copies = copies
        self.nbytes, self.copied = tensor.nbytes, 0
        self.address = tensor.data_ptr()
        self.end = self.address + tensor.nbytes
        self._tensor: Tensor | None = tensor
        self._watched: Tensor | None = tensor
        self._what = f"{tensor.dtype}, shape {tuple(tensor.shape)}"
        self._version = version_of(tensor)
        self._source = tensor.detach().view(-1).view(torch.uint8)
        self._first = self._read = 0
        self._is_lost = False
        self._lock = threading.Lock()

    @property
    def is_unread(self) -> bool:
        """Whether the tensor's own memory still has to be read; once it has not, it never has."""
        return self._tensor is not None

    def read_into(self, to: Tensor) -> None:
        """Read the next bytes, as many as ``to`` has, which lies on the host, too.

        Raises:
            RuntimeError: something else than the optimizer wrote the tensor.
        """
        with self._lock:
            begin = self._source.data_ptr() + self._read - self._first
            ctypes.memmove(
                to.data_ptr(), begin, to.nbytes
            )  # without the interpreter's lock
            self._look()
            if self._is_lost:
                raise written_by_others(self._what)
            self._read += to.nbytes
            if self._read == self.nbytes:
                self._keep(empty_host_tensor(), self._read)

    @in_own_modes
    def copy_rest(self) -> None:
        """Copy what was not read yet: the tensor's memory may be written from here on."""
        with self._lock:
            if self._tensor is None:
                return
            self._look()
            rest = self._source[self._read - self._first :]
            self.copied = rest.numel()
            self._keep(self._copies.take(rest.numel()).copy_(rest), self._read)

    def stop_watching(self) -> None:
        """The tensor gets other memory: what torch counts from here on are no writes to this one.

        NOTE: what is lent may be a view that shares the tensor's count of writes and not its moves.
        """
        with self._lock:
            self._look()
            self._watched = None

    def _keep(self, source: Tensor, first: int) -> None:
        """Read from this memory from now on, which begins with the byte ``first``."""
        self._source, self._first, self._tensor = source, first, None
        self._watched = None

    def _look(self) -> None:
        """Notice writes that were not announced, where torch counts them."""
        live = self._watched  # if it has other memory now, this is only the save's
        if live is not None and live.data_ptr() == self.address:
            self._is_lost = version_of(live) != self._version


class Lent:
    """What one save borrows.

    Args:
        tensors: contiguous ones on the host.
        loans: what it borrows of accelerators.

    Attributes:
        leases: one for each tensor.
        copies: where what has to be copied goes.
    """

    def __init__(self, tensors: Sequence[Tensor], loans: DeviceLoans) -> None:
        self.copies, self.loans = Copies(), loans
        self.leases = [Lease(tensor, self.copies) for tensor in tensors]
        self._apart: list[Lease] = []
        end = 0
        for lease in sorted(self.leases, key=lambda lease: lease.address):
            if lease.address < end:
                lease.copy_rest()  # memory that another one has, too
            else:
                self._apart.append(lease)
                end = lease.end
        self._starts = [lease.address for lease in self._apart]

    def between(self, begin: int, end: int) -> Iterable[Lease]:
        """Leases of memory between two addresses."""
        first = bisect.bisect_right(self._starts, begin)
        if first and self._apart[first - 1].end > begin:
            first -= 1
        return self._apart[first : bisect.bisect_left(self._starts, end)]


_lent: list[Lent] = []
"""What the save in the background borrows; at most one is under way.

NOTE: the thread that trains adds, the save's thread takes away; any thread looks. Work that was
begun before a save was called writes gradients and back buffers alone, which no save borrows.
"""


def lend(tensors: Sequence[Tensor], loans: DeviceLoans) -> Lent:
    """Borrow tensors of the host, and loans of accelerators, until :func:`give_back`."""
    lent = Lent(tensors, loans)
    _lent.append(lent)
    _watch_torch_optimizers()
    return lent


@cache
def _watch_torch_optimizers() -> None:
    """Have torch's optimizers wait before they write parameters of the model.

    NOTE: for good: a hook that went while a step in another thread calls hooks would fail it.
    """
    register_optimizer_step_pre_hook(_before_torchs_step)


def _before_torchs_step(*_: Any) -> None:
    for lent in tuple(_lent):
        lent.loans.wait()


def give_back(lent: Lent) -> None:
    """Nothing is read any more."""
    lent.loans.stop()
    if lent in _lent:
        _lent.remove(lent)


def is_lending() -> bool:
    """Whether :func:`before_writing` has anything to do."""
    return bool(_lent)


def is_borrowed(memory: Tensor) -> bool:
    """Whether a save still has to read of a contiguous plain tensor's memory on the host, so that
    who writes there pays for a copy."""
    begin = memory.data_ptr()
    end = begin + memory.nbytes
    return any(
        lease.is_unread for lent in tuple(_lent) for lease in lent.between(begin, end)
    )


def before_moving(memory: Tensor) -> None:
    """The tensor whose contiguous memory on the host this is will have other memory; what a save
    reads stays here."""
    begin = memory.data_ptr()
    for lent in tuple(_lent):
        for lease in lent.between(begin, begin + memory.nbytes):
            lease.stop_watching()


def before_writing(*lists: Iterable[Tensor | None]) -> None:
    """Tensors are about to be written, or handed to somebody who may: copy what saves have not read
    of them; of accelerators, wait until saves read nothing any more. Free while no save is under
    way."""
    for lent in tuple(_lent):
        waits = False
        for tensors in lists:
            for tensor in tensors:
                if tensor is not None:
                    waits |= not is_plain(tensor) or not host_memory.is_on_host(tensor)
                    _copy_rest(lent, tensor)
        if waits:
            lent.loans.wait()


def is_plain(tensor: Tensor) -> bool:
    """Whether it is known where its memory is; of others, layers above know."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _copy_rest(lent: Lent, tensor: Tensor) -> None:
    if not is_plain(tensor):
        leases: Iterable[Lease] = lent.leases
    elif not host_memory.is_on_host(tensor) or not tensor.numel():
        return
    else:
        begin, extent = tensor.data_ptr(), 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            extent += (size - 1) * stride
        leases = lent.between(begin, begin + extent * tensor.itemsize)
    for lease in leases:
        lease.copy_rest()
