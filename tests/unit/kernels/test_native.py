"""The native library in a process: threads, instruction sets, forks and bad arguments."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mp_optim.kernels import native_library as native_library_file
from mp_optim.kernels.codecs import Noise
from mp_optim.kernels.native import NativeBackend
from mp_optim.kernels.native_library import NativeLibrary, native_library, set_host_threads
from mp_optim.kernels.reference import ReferenceBackend
from support.kernel_bits import FIRST, REFERENCE, assert_same_lists, check
from support.kernel_cases import GROUP, KEYS, Case, lists_of, step_with

LIBRARY = native_library()

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(LIBRARY.handle is None, reason=f"no native kernels: {LIBRARY.why}"),
]


@pytest.fixture(autouse=True, params=LIBRARY.levels or [""])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run every test with each instruction set of this CPU."""
    before = LIBRARY.level
    LIBRARY.set_level(request.param)
    yield request.param
    LIBRARY.set_level(before)
    set_host_threads(None)


@pytest.mark.parametrize("threads", [1, 5])
def test_native_bits_do_not_depend_on_the_number_of_threads(threads):
    set_host_threads(threads)
    backend = NativeBackend(LIBRARY)
    for n in (131_072, 131_073, 400_003):
        for rule in ("adam", "lamb"):
            check(backend, rule, [n, 5], Case())
        grads = lists_of(3, [n, 5], (), Case()).grad
        assert torch.equal(backend.sum_of_squares(grads), REFERENCE.sum_of_squares(grads))
    for first in FIRST:
        second = torch.uint8 if first == torch.int8 else first
        for rest in (None, torch.int8):
            case = Case(output=None, rest=rest, moments=(first, second), noisy=True)
            check(backend, "adam", [150_000, 1], case)


def test_native_uses_the_reference_backend_when_output_or_seeds_are_not_supported(monkeypatch):
    """Native kernels support neither FP32 outputs with remainders nor several noise seeds in a
    call."""
    step, by_reference = ReferenceBackend.step, list[int]()

    def counted(self: ReferenceBackend, rule: str, part: Any, *arguments: Any) -> None:
        by_reference.append(len(part.main))
        step(self, rule, part, *arguments)

    monkeypatch.setattr(ReferenceBackend, "step", counted)
    compact = Case(rest=torch.int16, moments=(torch.int8, torch.uint8), output=None)
    for output, noise, expected in (
        (torch.float32, None, [2]),
        (None, [Noise(1, 2), Noise(2, 2)], [2]),
        (None, [Noise(1, 2, 256), Noise(1, 3)], []),
    ):
        ours, theirs = (
            replace(
                lists_of(4, [300, 400], KEYS["adam"], replace(compact, output=output)), noise=noise
            )
            for _ in range(2)
        )
        by_reference.clear()
        step_with(NativeBackend(LIBRARY), "adam", ours, GROUP, 3, 0.5)
        assert by_reference == expected
        step_with(REFERENCE, "adam", theirs, GROUP, 3, 0.5)
        assert_same_lists(ours, theirs)


def test_native_sum_of_squares_is_right_when_several_threads_call():
    grads = [[torch.full((200_000,), float(i))] for i in range(1, 5)]
    found: dict[int, float] = {}

    def measure(i: int) -> None:
        for _ in range(20):
            found[i] = float(NativeBackend(LIBRARY).sum_of_squares(grads[i])[0])

    workers = [threading.Thread(target=measure, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {i: 200_000.0 * (i + 1) ** 2 for i in range(4)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_native_kernels_work_in_a_forked_child():
    """A fork copies neither OpenMP's threads nor ours, and a child that waits for the missing
    threads would hang."""
    grads = [torch.full((300_000,), 2.0)]
    set_host_threads(2)
    assert float(NativeBackend(LIBRARY).sum_of_squares(grads)[0]) == 1.2e6
    child = os.fork()
    if child == 0:
        found = float(NativeBackend(LIBRARY).sum_of_squares(grads)[0])
        os._exit(0 if found == 1.2e6 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_native_library_raises_python_errors_for_bad_arguments():
    with pytest.raises(RuntimeError, match="mp_measure: a null pointer"):
        LIBRARY.call("mp_measure", None, None, None, 1)
    with pytest.raises(ValueError, match="MP_OPTIM_NATIVE='avx1024': this machine has"):
        LIBRARY.set_level("avx1024")
    with pytest.raises(ValueError, match="no native kernels"):
        NativeLibrary(None, "why").set_level("avx2")


def test_native_library_has_no_kernels_when_the_cpu_has_no_avx2_avx512_or_neon(monkeypatch):
    empty = SimpleNamespace(
        mp_abi=lambda: native_library_file._ABI, mp_level=lambda: b"", mp_levels=lambda: b""
    )
    monkeypatch.setattr(native_library_file.ctypes, "CDLL", lambda path: empty)
    found = native_library_file._load(Path("_native.so"))
    assert found.handle is None and "none of AVX2, AVX-512 and NEON" in found.why
