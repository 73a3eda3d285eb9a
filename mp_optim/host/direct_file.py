"""File for state that does not fit into memory. Several threads read and write the file without the
page cache.

The file is not a checkpoint. The constructor removes the file's name. So the operating system frees
the disk space when the process ends, and incomplete state cannot be mistaken for a checkpoint.

Only the process that created the file can use the file. A forked child's writes to tensors in the
file stay in the child's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

DISK_BLOCK = 4096
"""Unit in bytes of transfers without the page cache. File offsets, memory addresses and sizes are
multiples of this number."""
PIECE = 8 << 20
"""Largest number of bytes in one call of a thread."""
THREADS = 4
_THREAD_NAME = "mp_optim_disk"

_live: weakref.WeakSet[DirectFile] = weakref.WeakSet()
"""Files of this process, and files of the processes from which it was forked."""
_NORESERVE = 0x4000
"""Flag of Linux's mmap: a mapping may be larger than memory and swap."""

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_ADVICE = {
    errno.ENOSPC: "free disk space, or choose another folder",
    errno.EDQUOT: "your disk quota is used up; delete files, or choose another folder",
    errno.EFBIG: "the limit on the size of files is reached; raise it (ulimit -f)",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "you have no write permission; choose another folder",
    errno.EPERM: "you have no write permission; choose another folder",
    errno.ENOENT: "the folder does not exist; create it, or choose another folder",
    errno.ENOTDIR: "the path is not a folder; choose another folder",
    errno.EIO: "the disk fails (see the system's log); load the last checkpoint",
}


class Ticket:
    """Handle of a transfer in progress.

    NOTE: until :meth:`wait` returns, callers must not change memory that is written to the file,
    and must not use memory that the transfer fills.
    """

    def __init__(self, pieces: list[Future[None]]) -> None:
        self._pieces = pieces

    def wait(self) -> None:
        """Wait until the transfer is complete. The caller may then use the memory again.

        Raises:
            OSError: a piece could not be transferred. The message has the file's path and a remedy.
        """
        wait(self._pieces)
        for piece in self._pieces:
            piece.result()


class DirectFile:
    """File of zeros in a folder, for state of this process.

    Attributes:
        path: path at which the file was created. No directory entry remains there.
        direct: True if transfers bypass the page cache.
        why: reason in a sentence if transfers use the page cache; empty otherwise.

    Args:
        folder: folder on a local disk.
        num_bytes: size of the file in bytes. The constructor allocates all of it on the disk, so a
            full disk raises before anything is stepped.
        threads: number of threads that transfer pieces.
        piece_bytes: largest number of bytes of a piece; a multiple of :data:`DISK_BLOCK`.

    Raises:
        OSError: the file cannot be created. The message has the path and a remedy. No file remains.
    """

    def __init__(
        self, folder: str | Path, num_bytes: int, threads: int = THREADS, piece_bytes: int = PIECE
    ) -> None:
        self.path = Path(folder)
        self.num_bytes = 0
        self._piece = piece_bytes
        self.why = ""
        self._owner = os.getpid()
        self._mappings: list[tuple[int, int, int]] = []
        self._open = contextlib.ExitStack()
        with self._open as on_error, self.explained("making"):
            self._buffered, name = tempfile.mkstemp(prefix="mp_optim_state_", dir=folder)
            self._open.callback(os.close, self._buffered)
            self.path = Path(name)
            try:
                self._direct = self._opened_directly()
            finally:
                os.unlink(self.path)
            self.direct = not self.why
            self._allocate(num_bytes)
            self._open = on_error.pop_all()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=_THREAD_NAME)
        # NOTE: a transfer in progress references this object, so the finalizer cannot close the
        # file descriptor of a running transfer.
        weakref.finalize(self, _end, self._owner, self._pool, self._open)
        _live.add(self)

    def check_owner(self) -> None:
        """Raise if the calling process is a forked child.

        Raises:
            RuntimeError: another process created the file. The message has a remedy.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"optimizer_state_path={str(self.path.parent)!r}: the file belongs to process "
                f"{self._owner}, the parent of this forked process, and changes with the parent's "
                "steps; build an optimizer in the child and load a checkpoint, start the child by "
                "spawn, or set optimizer_state_path=None"
            )

    def grow(self, num_bytes: int) -> None:
        """Extend the file by ``num_bytes`` of zeros, and allocate these bytes on the disk.

        Raises:
            OSError: the disk is full. The message has the path and a remedy.
        """
        self.check_owner()
        with self.explained("making"):
            self._allocate(num_bytes)

    def mapped(self, offset: int, num_bytes: int) -> mmap.mmap:
        """Return bytes of the file as shared memory.

        All other readers of the file see changes of this memory. ``flush`` writes changes to the
        disk.

        Args:
            offset: first byte, a multiple of ``mmap.ALLOCATIONGRANULARITY``.
            num_bytes: size of the mapping in bytes.
        """
        with self.explained("mapping"):
            memory = mmap.mmap(self._buffered, num_bytes, offset=offset)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._mappings.append((address, num_bytes, offset))
        return memory

    def forget_cache(self) -> None:
        """Drop the file's pages from the page cache, except pages with changes that are not on the
        disk."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into(self, memory: Tensor, offset: int) -> Ticket:
        """Start to read bytes of the file into a host tensor.

        Args:
            memory: contiguous tensor; filled.
            offset: first byte in the file.

        Raises:
            ValueError: the bytes are outside the file, or offset, size or address is not a multiple
                of :data:`DISK_BLOCK`.
        """
        return self._begin("reading", os.preadv, memory, offset)

    def write_from(self, memory: Tensor, offset: int) -> Ticket:
        """Start to write a host tensor to the file. Transfers in progress must not overlap.

        Args:
            memory: contiguous tensor.
            offset: first byte in the file.

        Raises:
            ValueError: the bytes are outside the file, or offset, size or address is not a multiple
                of :data:`DISK_BLOCK`.
        """
        return self._begin("writing", os.pwritev, memory, offset)

    def close(self) -> None:
        """Wait for transfers in progress, and free the file's disk space."""
        self._pool.shutdown()
        self._mappings.clear()
        self._open.close()

    def __repr__(self) -> str:
        way = "past the page cache" if self.direct else f"buffered ({self.why})"
        return f"DirectFile({str(self.path)!r}, {self.num_bytes} bytes, {way})"

    def _opened_directly(self) -> int:
        """Return a file descriptor that bypasses the page cache, or the buffered descriptor if the
        file system refuses ``O_DIRECT``."""
        if not _O_DIRECT:
            self.why = "this system has no O_DIRECT"
            return self._buffered
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | _O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.why = f"the file system of {self.path.parent} refuses O_DIRECT"
            return self._buffered
        self._open.callback(os.close, file)
        return file

    def _allocate(self, num_bytes: int) -> None:
        system = os.fstatvfs(self._buffered)
        free = system.f_bavail * system.f_frsize
        # A file system that does not know its size reports 0 blocks, so skip the check there.
        if system.f_blocks and num_bytes > free:
            # Check the free space before allocating, because some file systems fill the disk before
            # they report an error.
            asked = f"{num_bytes} bytes requested, {free} free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {asked}")
        if num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._buffered, self.num_bytes, num_bytes)
        else:  # macOS has no posix_fallocate, so ENOSPC may be raised at the first write.
            os.ftruncate(self._buffered, self.num_bytes + num_bytes)
        self.num_bytes += num_bytes

    def _begin(self, what: str, move: Callable[..., int], memory: Tensor, offset: int) -> Ticket:
        self.check_owner()
        size = memory.numel() * memory.element_size()
        is_readable = memory.device.type == "cpu" and memory.is_contiguous()
        is_inside = offset >= 0 and offset + size <= self.num_bytes
        blocks = (offset, size, memory.data_ptr())
        if not (is_readable and is_inside) or any(number % DISK_BLOCK for number in blocks):
            raise ValueError(
                f"offset={offset}: {what} bytes {offset} to {offset + size} of {self.num_bytes} "
                f"in {self.path} with a tensor on {memory.device} at address {memory.data_ptr()} "
                f"is not possible, because transfers have whole blocks of {DISK_BLOCK} bytes "
                f"inside the file; pass a contiguous host tensor, and multiples of {DISK_BLOCK} "
                "as offset, size and address"
            )
        # Each call references its part of the memory, so the memory stays allocated if the caller
        # drops the ticket.
        pieces = torch.split(memory.view(-1).view(torch.uint8), self._piece) if size else ()
        starts = range(offset, offset + size, self._piece)
        return Ticket(
            [
                self._pool.submit(self._carry, what, move, piece, start)
                for piece, start in zip(pieces, starts, strict=True)
            ]
        )

    def _carry(self, what: str, move: Callable[..., int], piece: Tensor, offset: int) -> None:
        """Transfer a piece in a thread of the pool.

        The operating system may transfer fewer bytes than requested, so repeat the call. Bytes that
        are not whole blocks go through the page cache.
        """
        size = piece.numel()
        view = memoryview((ctypes.c_char * size).from_address(piece.data_ptr())).cast("B")
        with self.explained(f"{what} bytes {offset} to {offset + size} of"):
            while view:
                blocks = (offset | len(view)) % DISK_BLOCK == 0
                moved = move(self._direct if blocks else self._buffered, [view], offset)
                if not moved:
                    raise OSError(errno.EIO, "the file ends early")
                view, offset = view[moved:], offset + moved

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Add the operation, the file and a remedy to errors of the operating system."""
        try:
            yield
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0, "load the last checkpoint")
            file = "the optimizer's state file (optimizer_state_path)"
            text = f"{what} {file}: {error.strerror}; {advice}"
            raise OSError(error.errno, text, str(self.path)) from error


def _end(owner: int, pool: ThreadPoolExecutor, descriptors: contextlib.ExitStack) -> None:
    """End the threads of a file's pool, and close the file's descriptors."""
    # A thread of the pool may run this finalizer. A thread cannot wait for its own end, so do not
    # wait in such a thread. A forked child does not have the pool's threads, so only close the
    # descriptors there.
    in_pool = threading.current_thread().name.startswith(_THREAD_NAME)
    if os.getpid() == owner:
        pool.shutdown(wait=not in_pool)
    descriptors.close()


# -- forks ----------------------------------------------------------------------------------------

_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _keep_from_parent() -> None:
    """Make writes to the file's mapped memory private in a forked child, so that the child cannot
    change the parent's state."""
    private = mmap.MAP_PRIVATE | _MAP_FIXED | _NORESERVE
    both = mmap.PROT_READ | mmap.PROT_WRITE
    for file in list(_live):
        for address, size, offset in file._mappings:
            given = _libc.mmap(address, size, both, private, file._buffered, offset)
            if given != address:
                _libc.mprotect(address, size, mmap.PROT_READ)


if sys.platform == "linux":  # Only Linux has the mmap flags that the handler uses.
    os.register_at_fork(after_in_child=_keep_from_parent)
