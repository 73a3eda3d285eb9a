"""A step keeps denormal numbers, even in threads that flush denormals to zero."""

import hashlib
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import mp_optim
from mp_optim.host.calls import torch_threads_flush
from mp_optim.kernels.native_library import set_host_threads
from support.kernels import needs_kernels

T = TypeVar("T")
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (mp_optim.AdamW, {"eps": 1e-30}),
    "adamw on the host": (mp_optim.AdamW, {"eps": 1e-30, "offload": 1.0}),
    "speculative": (mp_optim.AdamW, {"eps": 1e-30, "offload": 1.0, "offload_mode": "speculative"}),
    "lamb": (mp_optim.LAMB, {"eps": 1e-30}),
    "lion": (mp_optim.Lion, {}),
    "muon": (mp_optim.Muon, {}),
    "8bit": (mp_optim.AdamW, {"eps": 1e-30, "state": "8bit", "ema_decay": 0.9}),
}


def in_new_thread(work: Callable[[], T]) -> T:
    """Run a function in a new thread, whose new OpenMP threads inherit the floating-point mode of
    that thread."""
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(2,)) as threads:
        return threads.submit(work).result()


def flushes() -> bool:
    return bool(torch.tensor(1e-40, dtype=torch.float32).mul(1.0).view(torch.int32) == 0)


def start_pool() -> None:
    torch.ones(1 << 18).mul_(2.0)


def trained(name: str, flush: bool, pool_first: bool, **more: Any) -> str:
    def work() -> str:
        torch.set_flush_denormal(flush and not pool_first)
        start_pool()
        torch.set_flush_denormal(flush)
        generator = torch.Generator().manual_seed(0)
        param = nn.Parameter(torch.randn(512, 300, generator=generator))
        cls, settings = CLASSES[name]
        optimizer = cls([("p", param)], lr=1e-3, **settings, **more)
        for _ in range(3):
            (param * (torch.randn(512, 300, generator=generator) * 1e-20)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert flushes() == flush
        torch.set_flush_denormal(False)
        digest = hashlib.sha256()
        for tensor in (param, *optimizer.state_dict()["state"][0].values()):
            assert isinstance(tensor, Tensor)
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    return in_new_thread(work)


@needs_kernels
@pytest.mark.parametrize("name", CLASSES)
def test_step_has_same_bits_when_threads_flush_denormals(name):
    set_host_threads(1)
    expected = trained(name, False, False)
    found = {}
    for threads in (1, 2):
        set_host_threads(threads)
        for pool_first in (False, True):
            found[threads, pool_first] = trained(name, True, pool_first)
    assert set(found.values()) == {expected}, found


def test_reference_has_same_bits_when_the_calling_thread_flushes_denormals():
    expected = trained("adamw", False, True, backend="reference")
    assert trained("adamw", True, True, backend="reference") == expected


@needs_kernels
def test_audit_names_the_denormal_mode_when_threads_of_torch_flush_denormals():
    def work() -> list[str]:
        torch.set_flush_denormal(True)
        start_pool()
        torch.set_flush_denormal(False)
        if not torch_threads_flush():
            pytest.skip("torch's threads do not inherit the mode here")
        param = nn.Parameter(torch.randn(512, 300))
        given = {"eps": 1e-30, "backend": "reference", "audit_rate": 1.0}
        optimizer = mp_optim.AdamW([("p", param)], lr=1e-3, audit_action="raise", **given)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                param.grad = torch.randn(512, 300) * 1e-20
                optimizer.step()
        return [str(each.message) for each in caught]

    messages = in_new_thread(work)
    assert any("torch's threads flush denormal numbers to zero" in each for each in messages)
