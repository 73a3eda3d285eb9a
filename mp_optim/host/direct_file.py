"""A file for state that does not fit into memory. Windows of it are read and written past the page
cache, in pieces, by several threads.

The file is not a checkpoint. It has no name once it is open, so the system frees it when the
process ends, and half-written state cannot be mistaken for a whole one.

The file belongs to the process that made it. A forked child cannot use it, and the child's writes
to tensors in the file stay in its own memory.
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
"""Past the page cache, addresses in file and memory and numbers of bytes are multiples of this."""
PIECE = 8 << 20
"""Bytes of a window that one thread carries at once."""
THREADS = 4
_THREAD_NAME = "mp_optim_disk"

_live: weakref.WeakSet[DirectFile] = weakref.WeakSet()
"""Files of this process, and of those that it was forked from."""
_NORESERVE = 0x4000
"""A Linux flag: a file may be larger than memory and swap."""

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_ADVICE = {
    errno.ENOSPC: "free space there, or choose another folder",
    errno.EDQUOT: "your quota there is used up; free space, or choose another folder",
    errno.EFBIG: "a limit on the size of files is in force (ulimit -f); raise it",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "this process may not write there; choose another folder",
    errno.EPERM: "this process may not write there; choose another folder",
    errno.ENOENT: "the folder does not exist; make it, or choose another",
    errno.ENOTDIR: "this is no folder; choose another",
    errno.EIO: "the disk fails (see the system's log); go on from the last checkpoint",
}


class Ticket:
    """A transfer in progress.

    NOTE: the transfer owns its memory until :meth:`wait` returns. Memory that is written to the
    file must not change, and memory that is read into must not be used.
    """

    def __init__(self, pieces: list[Future[None]]) -> None:
        self._pieces = pieces

    def wait(self) -> None:
        """Wait until nothing uses the memory any more.

        Raises:
            OSError: a piece failed; with the file's path and what to do.
        """
        wait(self._pieces)
        for piece in self._pieces:
            piece.result()


class DirectFile:
    """A file of a fixed size in a folder, zero at first.

    Attributes:
        path: where it was made; it has no name there any more.
        direct: whether transfers go past the page cache.
        why: if they do not, the reason in a sentence.

    Args:
        folder: on a local disk.
        num_bytes: of the file. All of it is taken from the disk now, so that a full disk is noticed
            before anything is stepped.
        threads: that carry pieces.
        piece_bytes: a multiple of :data:`DISK_BLOCK`.

    Raises:
        OSError: it cannot be made; with the path and what to do. Nothing is left there.
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
        # NOTE: a transfer in progress holds this object, so its descriptor stays open.
        weakref.finalize(self, _end, self._owner, self._pool, self._open)
        _live.add(self)

    def check_owner(self) -> None:
        """Refuse to work in a forked child.

        Raises:
            RuntimeError: this process has not made the file; with what to do.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"optimizer_state_path: the state is in a file in {self.path.parent} that belongs "
                f"to the parent process {self._owner} of this forked process, and changes with "
                "its steps. Build an optimizer in the child and load a checkpoint, start the "
                "child by spawn, or keep the state in memory (optimizer_state_path=None)"
            )

    def grow(self, num_bytes: int) -> None:
        """Extend the file by ``num_bytes`` of zeros, and allocate them on the disk.

        Raises:
            OSError: the disk is full; with the path and the remedy.
        """
        self.check_owner()
        with self.explained("making"):
            self._allocate(num_bytes)

    def mapped(self, offset: int, num_bytes: int) -> mmap.mmap:
        """Return bytes of the file as shared memory. Changes there are visible to all other readers
        of the file, and on the disk at the latest after ``flush``.

        Args:
            offset: a multiple of ``mmap.ALLOCATIONGRANULARITY``.
            num_bytes: size of the mapping in bytes.
        """
        with self.explained("mapping"):
            memory = mmap.mmap(self._buffered, num_bytes, offset=offset)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._mappings.append((address, num_bytes, offset))
        return memory

    def forget_cache(self) -> None:
        """Drop the system's cached pages of the file, except changed pages that are not on the disk
        yet."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into(self, memory: Tensor, offset: int) -> Ticket:
        """Start to fill a contiguous host tensor with the bytes from ``offset`` on.

        Raises:
            ValueError: the bytes are not in the file, or file offset, size or memory address is no
                multiple of :data:`DISK_BLOCK`.
        """
        return self._begin("reading", os.preadv, memory, offset)

    def write_from(self, memory: Tensor, offset: int) -> Ticket:
        """Start to write a contiguous host tensor to the bytes from ``offset`` on. Transfers that
        are under way together must not overlap.

        Raises:
            ValueError: as for :meth:`read_into`.
        """
        return self._begin("writing", os.pwritev, memory, offset)

    def close(self) -> None:
        """Wait for transfers in progress, and free the file's space."""
        self._pool.shutdown()
        self._mappings.clear()
        self._open.close()

    def __repr__(self) -> str:
        way = "past the page cache" if self.direct else f"buffered ({self.why})"
        return f"DirectFile({str(self.path)!r}, {self.num_bytes} bytes, {way})"

    def _opened_directly(self) -> int:
        """Return the file opened without the page cache, or its other descriptor if that is
        refused."""
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
        if system.f_blocks and num_bytes > free:  # 0 if the file system reports no size
            # Asked first: some file systems would fill the disk before they notice.
            asked = f"{num_bytes} bytes asked for, {free} free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {asked}")
        if num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._buffered, self.num_bytes, num_bytes)
        else:  # macOS reports only the bytes that are free now
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
                f"{what} {self.path}: bytes {offset} to {offset + size} of {self.num_bytes} with "
                f"a tensor at address {memory.data_ptr()} on {memory.device}; pass a contiguous "
                f"host tensor, and whole blocks of {DISK_BLOCK} bytes inside the file"
            )
        # Each piece holds its memory, so that it outlives a ticket that is not waited for.
        pieces = torch.split(memory.view(-1).view(torch.uint8), self._piece) if size else ()
        starts = range(offset, offset + size, self._piece)
        return Ticket(
            [
                self._pool.submit(self._carry, what, move, piece, start)
                for piece, start in zip(pieces, starts, strict=True)
            ]
        )

    def _carry(self, what: str, move: Callable[..., int], piece: Tensor, offset: int) -> None:
        """Transfer a piece, in a thread of the pool, until it is complete: the system may transfer
        less than requested. A part that is not whole blocks goes through the page cache."""
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
        """Add the operation, the file and the remedy to the system's errors."""
        try:
            yield
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0, "go on from the last checkpoint")
            file = "the optimizer's state file (optimizer_state_path)"
            text = f"{what} {file}: {error.strerror}; {advice}"
            raise OSError(error.errno, text, str(self.path)) from error


def _end(owner: int, pool: ThreadPoolExecutor, descriptors: contextlib.ExitStack) -> None:
    """End a file's threads, which have nothing to do, and close its descriptors."""
    # A thread of a pool can be the one that drops a file; it must not wait for itself. A forked
    # child has no such threads.
    in_pool = threading.current_thread().name.startswith(_THREAD_NAME)
    if os.getpid() == owner:
        pool.shutdown(wait=not in_pool)
    descriptors.close()


# -- forks ----------------------------------------------------------------------------------------

_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _keep_from_parent() -> None:
    """Make writes to mapped memory private in a forked child."""
    private = mmap.MAP_PRIVATE | _MAP_FIXED | _NORESERVE
    both = mmap.PROT_READ | mmap.PROT_WRITE
    for file in list(_live):
        for address, size, offset in file._mappings:
            given = _libc.mmap(address, size, both, private, file._buffered, offset)
            if given != address:
                _libc.mprotect(address, size, mmap.PROT_READ)


if sys.platform == "linux":  # with other start methods a child's tensors belong to its parent
    os.register_at_fork(after_in_child=_keep_from_parent)
