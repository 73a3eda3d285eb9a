"""Page-locked memory of exact size, with the system's mlock in place of CUDA."""

import gc
import mmap
import os
import sys
import textwrap
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from mp_optim.host import host_memory
from mp_optim.host.host_memory import (
    REGISTERED_FROM,
    PageLockError,
    page_locked,
    page_locked_bytes,
    power_of_two,
    tensor_in,
)
from support.cuda_runtime import (
    LockingCuda,
    LockingRuntime,
    can_lock,
    is_mapped,
    locked_bytes,
    locking_runtime,
)
from support.launch import end_forked_program

CUDA = torch.device("cuda", 1)
SIZE = 33 * 10**6

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not can_lock(SIZE),
    reason="needs a system that locks pages for this process",
)


@pytest.fixture
def runtime() -> Iterator[LockingRuntime]:
    with locking_runtime() as runtime:
        yield runtime


@pytest.mark.parametrize("size", [1, mmap.PAGESIZE, REGISTERED_FROM + 1, SIZE])
def test_page_locked_memory_locks_only_allocated_pages_until_freed(runtime, size):
    before = locked_bytes()
    memory = page_locked(size, CUDA)
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    assert locked_bytes() - before == pages
    assert size < REGISTERED_FROM or page_locked_bytes(size) == pages
    assert memory.shape == (size,) and memory.dtype == torch.uint8 and not memory.any()
    assert memory.fill_(7).sum() == 7 * size
    del memory
    assert locked_bytes() == before


def test_page_locked_memory_is_unregistered_once_before_unmapping(runtime):
    memory = page_locked(SIZE, CUDA)
    address = memory.data_ptr()
    part = tensor_in(memory, 4096, torch.Size([5]), torch.float32)
    del memory
    gc.collect()
    assert runtime.registered == {address: SIZE} and part.sum() == 0
    del part
    gc.collect()
    assert runtime.calls == [
        ("register", address, 1),
        ("synchronize", 0, 1),
        ("unregister", address, 1),
    ]
    assert not is_mapped(address)


def test_page_locked_memory_freed_during_a_graph_capture_is_unregistered_afterwards(runtime):
    """The garbage collector may free memory during a graph capture, and waiting for the device
    would end the capture."""
    memory = page_locked(SIZE, CUDA)
    address = memory.data_ptr()
    runtime.is_capturing = True
    del memory
    gc.collect()
    assert runtime.registered == {address: SIZE}
    runtime.is_capturing = False
    other = page_locked(SIZE, CUDA)
    assert list(runtime.registered) == [other.data_ptr()]


def test_page_locked_memory_stays_mapped_when_unregistering_fails(runtime):
    memory = page_locked(SIZE, CUDA)
    address, runtime.status = memory.data_ptr(), 1
    del memory
    assert runtime.calls[-1] == ("unregister", address, 1) and is_mapped(address)


@pytest.mark.parametrize("error", [AssertionError("not compiled\nmore"), RuntimeError("no driver")])
def test_page_locked_names_the_cause_when_the_cuda_runtime_is_missing(error):
    text = str(error).partition("\n")[0]
    with (
        locking_runtime(),
        mock.patch.object(LockingCuda, "_runtime", side_effect=error),
        pytest.raises(PageLockError, match=f"^{text}$"),
    ):
        page_locked(SIZE, CUDA)


def test_page_locked_unmaps_memory_when_registering_fails(runtime):
    runtime.status = 2
    with (
        mock.patch.object(host_memory.torch, "zeros", side_effect=RuntimeError) as kernel,
        pytest.raises(PageLockError, match=r"^cudaHostRegister: error 2$"),
    ):
        page_locked(SIZE, CUDA)
    # A launch makes CUDA raise its pending error.
    kernel.assert_called_once_with(1, dtype=torch.float32, device=CUDA)
    gc.collect()
    ((what, address, _),) = runtime.calls
    assert what == "register" and not is_mapped(address)


def test_page_locked_memory_is_not_mapped_in_a_forked_child(runtime):
    memory = page_locked(SIZE, CUDA)
    address = memory.data_ptr()
    child = os.fork()
    if child == 0:
        has_it = is_mapped(address)
        del memory
        gc.collect()
        os._exit(has_it + 2 * len(runtime.calls[1:]))
    assert os.waitpid(child, 0)[1] == 0
    memory.fill_(3)
    assert runtime.registered == {address: SIZE}


IN_CHILD = """
    import atexit
    atexit.register(lambda: print([what for what, _, _ in runtime.calls]))  # the last to run
    import ctypes, gc, mmap, os
    import torch
    from mp_optim.host.host_memory import page_locked
    from support.cuda_runtime import is_mapped, locking_runtime

    context = locking_runtime()
    runtime = context.__enter__()
    memory = page_locked({size}, torch.device("cuda", 0))
    address = memory.data_ptr()
    {then}
"""


def run(then: str) -> str:
    script = textwrap.dedent(IN_CHILD.format(size=SIZE, then=then))
    done = end_forked_program("-c", script, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.strip()


def test_page_locked_memory_stays_registered_at_interpreter_exit():
    assert run("pass") == "['register']"


def test_page_locked_bytes_round_small_sizes_to_powers_of_two():
    sizes = [0, 1, 2, 3, 64, 65, REGISTERED_FROM - 1]
    assert [power_of_two(size) for size in sizes] == [0, 1, 2, 4, 64, 128, REGISTERED_FROM]
    assert [page_locked_bytes(size) for size in sizes] == list(map(power_of_two, sizes))
    assert page_locked_bytes(35 << 30) == 35 << 30 and power_of_two(35 << 30) == 64 << 30
