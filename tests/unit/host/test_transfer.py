"""torch calls of the CUDA transfer, on a simulated accelerator."""

import gc
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from mp_optim import FusedAdam, HybridDeviceOptimizer
from mp_optim.host.host_memory import HUGE_FROM, REGISTERED_FROM, page_locked
from mp_optim.host.transfer import CudaTransfer, Transfer, transfer_for
from support.accelerator.simulation import KIND, device_at
from support.accelerator.stand_in import simulated_accelerator
from support.cuda_runtime import LockingRuntime, can_lock, locking_runtime
from support.offload import MODES

DEVICE = 1
SIMULATED = device_at(DEVICE)


@pytest.mark.native
@pytest.mark.parametrize("mode", MODES)
def test_hybrid_step_copies_once_per_bucket_and_direction(mode):
    with simulated_accelerator() as simulation:
        params = [nn.Parameter(torch.ones(16)) for _ in range(12)]
        optimizer = HybridDeviceOptimizer(
            params, 1.0, FusedAdam, FusedAdam, lr=0.5, offload_mode=mode
        )
        optimizer.stepper.use_transfer(transfer_for(SIMULATED), 4 * 2 * 64)
        for param in params:
            simulation.to_device(param, DEVICE)
            param.grad = simulation.to_device(torch.ones(16), DEVICE)
        optimizer.step()  # The first step creates main params and state.
        for _ in range(2):
            with mock.patch.object(simulation, "queue", wraps=simulation.queue) as spy:
                optimizer.step()
            deeds = Counter(call.args[2].what for call in spy.call_args_list)
            copies = {what: count for what, count in deeds.items() if "copy" in what}
            # The result that tells which parameters other code wrote.
            found = {"aten.copy_.default": 1}
            assert copies == {"aten._foreach_copy_.default": 2 * 3, **found}
        simulation.synchronize()
        assert not any(region.recorded for region in simulation.memory)
    assert not simulation.reports


locks = pytest.mark.skipif(
    not can_lock(2 * REGISTERED_FROM), reason="needs a system that locks pages for this process"
)


@pytest.fixture
def transfer() -> Iterator[CudaTransfer]:
    with simulated_accelerator():
        yield transfer_for(SIMULATED)


@pytest.fixture
def runtime(transfer: CudaTransfer) -> Iterator[LockingRuntime]:
    with locking_runtime(KIND) as runtime:
        yield runtime


class TorchAllocator:
    def __init__(self, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self._error, self._empty = error, torch.empty

    def __call__(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        if pin_memory:
            self.sizes.append(args[0])
            if self._error is not None:
                raise self._error
        return self._empty(*args, **kwargs)


def flags_of(address: int) -> list[str]:
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(number, 16) for number in words[0].split("-"))
            is_here = first <= address < last
        elif is_here and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError("nothing is mapped there")


@locks
def test_cuda_transfer_registers_only_large_host_memory(transfer, runtime, monkeypatch):
    allocator = TorchAllocator()
    monkeypatch.setattr(torch, "empty", allocator)
    small = transfer.empty_host(REGISTERED_FROM - 1, True)
    large = transfer.empty_host(REGISTERED_FROM, True)
    assert allocator.sizes == [small.numel()]
    assert list(runtime.registered.items()) == [(large.data_ptr(), large.numel())]
    assert transfer.notes() == () and {"hg", "dc"} <= set(flags_of(large.data_ptr()))


def test_cuda_transfer_uses_huge_pages_for_pageable_memory(transfer):
    assert "hg" in flags_of(transfer.empty_host(HUGE_FROM, False).data_ptr())


REFUSED = (
    "page-locked memory could not be registered (cudaHostRegister: error 2), so torch's "
    "allocator provides it and rounds each allocation up to a power of two"
)
NONE_AT_ALL = (
    "page-locked memory is not available (no driver), so pageable memory is used, which "
    "makes copies slower and prevents overlap with kernels"
)


@pytest.mark.parametrize("works", [True, False])
def test_cuda_transfer_warns_once_when_page_locking_fails(transfer, runtime, monkeypatch, works):
    runtime.status = 2
    allocator = TorchAllocator(None if works else RuntimeError("no driver\nmore"))
    monkeypatch.setattr(torch, "empty", allocator)
    expected = [REFUSED] if works else [REFUSED, NONE_AT_ALL]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            memory = transfer.empty_host(HUGE_FROM, True)
            assert memory.shape == (HUGE_FROM,) and memory.dtype == torch.uint8
    assert [str(warning.message) for warning in caught] == expected
    assert transfer.notes() == tuple(expected) and len(allocator.sizes) == 2
    assert works or "hg" in flags_of(memory.data_ptr())


class Registering(Transfer):
    """A transfer that copies synchronously and registers its host memory."""

    is_same_place = False

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        return page_locked(num_bytes, SIMULATED)


@locks
@pytest.mark.native
@pytest.mark.parametrize("mode", MODES)
def test_hybrid_optimizer_unregisters_all_host_memory_when_deleted(mode):
    with locking_runtime(KIND) as runtime:
        params = [nn.Parameter(torch.ones(size)) for size in (4096, 1, 100_000)]
        optimizer = HybridDeviceOptimizer(
            params, 1.0, FusedAdam, FusedAdam, lr=0.5, offload_mode=mode
        )
        optimizer.stepper.use_transfer(Registering(), 1 << 15)
        for _ in range(3):  # The optimizer chooses its buckets again after the first step.
            torch.cat(params).sum().backward()
            optimizer.step()
        held = sum(map(sum, optimizer.stepper.host_bytes()))
        assert sum(runtime.registered.values()) == held > 0
        del optimizer
        gc.collect()
        assert runtime.registered == {}
