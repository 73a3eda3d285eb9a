"""A state file that bypasses the page cache: whole blocks in any order, and disk errors."""

import errno
import functools
import os
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mp_optim.host.direct_file import DISK_BLOCK, DirectFile
from support.launch import run_forked_program

PIECE = 16 * DISK_BLOCK
SIZE = 3 * PIECE + 5 * DISK_BLOCK


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def aligned(size: int) -> torch.Tensor:
    memory = torch.zeros(size + DISK_BLOCK, dtype=torch.uint8)
    begin = -memory.data_ptr() % DISK_BLOCK
    return memory[begin : begin + size]


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    system_open = os.open

    def opened(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return system_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", opened)


BLOCKS = st.integers(0, SIZE // DISK_BLOCK)
WRITES = st.lists(st.tuples(BLOCKS, BLOCKS), max_size=5)


@pytest.mark.parametrize("direct", [True, False])
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(writes=WRITES)
def test_direct_file_reads_back_any_written_blocks(tmp_path, direct, writes):
    with pytest.MonkeyPatch.context() as patch:
        if not direct:
            refuse_direct(patch)
        file = DirectFile(tmp_path, SIZE, piece_bytes=PIECE)
    assert direct or not file.direct
    expected = torch.zeros(SIZE, dtype=torch.uint8)
    with closing(file):
        for seed, ends in enumerate(writes):
            begin, end = (block * DISK_BLOCK for block in sorted(ends))
            source = aligned(end - begin)
            source.copy_(random_bytes(end - begin, seed))
            expected[begin:end] = source
            file.write_from(source, begin).wait()
            back = aligned(end - begin)
            file.read_into(back, begin).wait()
            assert torch.equal(back, source)
        whole = aligned(SIZE)
        file.read_into(whole, 0).wait()
    assert torch.equal(whole, expected)


def _a_block(move, file, views, offset):
    return move(file, [views[0][:DISK_BLOCK]], offset)


def _no_whole_block(move, file, views, offset):
    return min(move(file, views, offset), 1000)


@pytest.mark.parametrize("less", [_a_block, _no_whole_block])
def test_direct_file_repeats_the_system_call_after_a_partial_transfer(tmp_path, monkeypatch, less):
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, functools.partial(less, getattr(os, name)))
    data, back = aligned(4 * DISK_BLOCK), aligned(4 * DISK_BLOCK)
    data.copy_(random_bytes(4 * DISK_BLOCK))
    with closing(DirectFile(tmp_path, 4 * DISK_BLOCK)) as file:
        file.write_from(data, 0).wait()
        file.read_into(back, 0).wait()
    assert torch.equal(back, data)


def test_direct_file_names_the_bytes_when_the_file_ends_early(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: 0)
    with closing(DirectFile(tmp_path, 2 * DISK_BLOCK)) as file:
        ticket = file.read_into(aligned(DISK_BLOCK), DISK_BLOCK)
        with pytest.raises(OSError, match=r"reading bytes 4096 to 8192 of .* ends early"):
            ticket.wait()


def bytes_from_the_disk() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("\nread_bytes:")[1].split()[0])


def test_direct_file_reads_from_the_disk_not_from_the_page_cache(tmp_path):
    window = aligned(PIECE)
    with closing(DirectFile(tmp_path, PIECE)) as file:
        if not file.direct or _in_memory(tmp_path):
            pytest.skip("needs a disk that takes O_DIRECT")
        file.write_from(window, 0).wait()
        before = bytes_from_the_disk()
        file.read_into(window, 0).wait()
        assert bytes_from_the_disk() - before >= PIECE


def _in_memory(folder: Path) -> bool:
    mounted = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    mounts = {path: kind for path, kind in mounted if folder.is_relative_to(path)}
    return mounts[max(mounts, key=len)] in ("tmpfs", "ramfs")


def test_direct_file_repr_says_buffered_when_the_file_system_refuses_o_direct(
    tmp_path, monkeypatch
):
    refuse_direct(monkeypatch)
    with closing(DirectFile(tmp_path, 10)) as file:
        assert not file.direct
        assert file.why == f"the file system of {tmp_path} refuses O_DIRECT"
        assert "buffered (the file system" in repr(file)


def test_direct_file_keeps_source_memory_until_the_write_ends(tmp_path):
    data, back = aligned(64 * PIECE), aligned(64 * PIECE)
    data.copy_(random_bytes(64 * PIECE))
    with closing(DirectFile(tmp_path, 64 * PIECE, threads=1, piece_bytes=PIECE)) as file:
        source = aligned(64 * PIECE).copy_(data)
        file.write_from(source, 0)
        del source
        file.read_into(back, 0).wait()
    assert torch.equal(back, data)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("/sys/kernel", "no write permission; choose another folder"),
        (sys.executable, "the path is not a folder; choose another"),
    ],
)
def test_direct_file_names_the_folder_when_the_folder_is_not_writable(folder, said):
    with pytest.raises(OSError, match=said) as error:
        DirectFile(folder, 10)
    assert folder in str(error.value)


def test_direct_file_refuses_a_size_above_the_free_space(tmp_path):
    with pytest.raises(OSError, match=r"requested, \d+ free; free disk space") as error:
        DirectFile(tmp_path, 1 << 50)
    assert error.value.errno == errno.ENOSPC and str(tmp_path) in str(error.value)
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource, sys, torch
from mp_optim.host.direct_file import DirectFile
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
limit(1 << 20)
try:
    DirectFile(sys.argv[1], 1 << 24)
except OSError as error:
    print("making:", error)
limit(resource.RLIM_INFINITY)
file = DirectFile(sys.argv[1], 1 << 24)
limit(1 << 20)
memory = torch.ones((1 << 24) + 4096, dtype=torch.uint8)
memory = memory[-memory.data_ptr() % 4096 :][: 1 << 24]
ticket = file.write_from(memory, 0)
try:
    ticket.wait()
except OSError as error:
    print("writing:", error)
file.read_into(memory[: 1 << 20], 0).wait()
file.close()
"""


def test_direct_file_names_ulimit_when_the_file_size_limit_is_reached(tmp_path):
    making, writing = run_forked_program("-c", LIMITED, str(tmp_path)).splitlines()
    for line in (making, writing):
        assert "File too large" in line and "ulimit -f" in line and str(tmp_path) in line
    assert writing.startswith("writing: [Errno 27] writing bytes ")


@pytest.mark.parametrize(
    ("memory", "offset", "said"),
    [
        (aligned(DISK_BLOCK), -DISK_BLOCK, "bytes -4096 to 0 of 8192"),
        (aligned(DISK_BLOCK), 2 * DISK_BLOCK, "bytes 8192 to 12288 of 8192"),
        (aligned(DISK_BLOCK), 1, "whole blocks of 4096"),
        (aligned(DISK_BLOCK)[1:], 0, "whole blocks of 4096"),
        (torch.zeros(4, 4).t()[:2], 0, "pass a contiguous host tensor"),
        (torch.zeros(4, device="meta"), 0, "pass a contiguous host tensor"),
    ],
)
def test_direct_file_refuses_unaligned_and_out_of_range_transfers(tmp_path, memory, offset, said):
    with closing(DirectFile(tmp_path, 2 * DISK_BLOCK)) as file:
        for begin in (file.read_into, file.write_from):
            with pytest.raises(ValueError, match=said):
                begin(memory, offset)
