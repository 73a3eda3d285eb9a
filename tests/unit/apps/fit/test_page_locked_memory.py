"""Planned bytes of page-locked host memory equal the bytes that the allocators take."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mp_optim import get_megatron_optimizer
from mp_optim.apps.fit.model_plan import plan
from mp_optim.host.host_memory import page_locked_bytes, power_of_two
from mp_optim.host.transfer import Transfer
from mp_optim.offload import hybrid
from support.models import config_for
from support.offload import MODES, hybrids

DOCS = Path(__file__).parents[4] / "docs" / "process.md"


class ChargingTransfer(Transfer):
    """Counts the bytes of live host buffers as their allocators do. A page-locked buffer of 1 MiB
    or more takes whole pages of 4 KiB. A smaller buffer is rounded up to a power of two."""

    is_same_place = False

    def __init__(self) -> None:
        self._pieces: list[tuple[StorageWeakRef, bool, int]] = []

    def empty_host(self, num_bytes: int, pin: bool) -> Tensor:
        piece, charge = super().empty_host(num_bytes, pin), num_bytes
        if pin and num_bytes >= 1 << 20:
            charge = math.ceil(num_bytes / 4096) * 4096
        elif pin:
            charge = 2 ** math.ceil(math.log2(num_bytes))
        storage = StorageWeakRef(piece.untyped_storage())
        self._pieces.append((storage, pin, charge))
        return piece

    def charged(self, pin: bool) -> int:
        return sum(
            charge
            for storage, is_pinned, charge in self._pieces
            if is_pinned == pin and not storage.expired()
        )


@pytest.mark.native
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("precision", "pins", "width"),
    [
        ("fp32", True, 700),
        ("bf16", True, 1500),
        ("bf16", False, 700),
        ("bf16-remainder", False, 1500),
        ("bf16-8bit", True, 700),
    ],
)
def test_plan_equals_host_memory_that_a_run_allocates(mode, precision, pins, width, monkeypatch):
    pinned = {"pin_cpu_grads": pins, "pin_cpu_params": pins}
    config = config_for(precision, 1.0, clip_grad=0.0, offload_mode=mode, **pinned)
    layers = [nn.Linear(1111, width), nn.Linear(width, width), nn.Linear(width, 1)]
    model = nn.Sequential(*layers)
    model = model.bfloat16() if config.bf16 else model
    planned, transfer = plan(model, config), ChargingTransfer()
    monkeypatch.setattr(hybrid, "transfer_for", lambda device: transfer)
    optimizer = get_megatron_optimizer(config, model)
    for _ in range(3):
        x = torch.ones(1, 1111, dtype=layers[0].weight.dtype)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert transfer.charged(True) == pytest.approx(planned.pinned_host.total, rel=0.01)
    pageable = planned.pageable_host.double_buffers
    if not pins:
        of_state = sum(
            value.nbytes
            for state in optimizer.state_dict()["state"].values()
            for key, value in state.items()
            if key == "remainder"
        )
        pageable += planned.pageable_host.staging
        pageable += planned.pageable_host.main_params - of_state
    assert transfer.charged(False) == pytest.approx(pageable, rel=0.01)
    assert (transfer.charged(True) > 0) == pins


def sizes_of(elements: int) -> Iterator[int]:
    for size in itertools.cycle([4096 * 4096] * 4 + [4096 * 11008] * 3):
        yield min(size, elements)
        elements -= size
        if elements <= 0:
            return


def pieces_of(elements: int) -> dict[str, list[int]]:
    config = config_for("bf16", 1.0, offload_mode="speculative")
    kind = {"dtype": torch.bfloat16, "device": "meta"}
    params = [nn.Parameter(torch.empty(size, **kind)) for size in sizes_of(elements)]
    (inner,) = hybrids(get_megatron_optimizer(config, nn.ParameterList(params)))
    held = inner.stepper.host_bytes()
    return {
        "main params": [inner.executor.main_memory.capacity],
        "staging": list(held.staging),
        "back buffer of main params": list(held.back_mains),
    }


def test_page_locked_pieces_take_less_than_82_percent_of_power_of_two_allocations():
    found = {
        name: (sum(map(power_of_two, pieces)), sum(map(page_locked_bytes, pieces)))
        for name, pieces in pieces_of(7 * 10**9).items()
    }
    rounded, ours = (f"{size / 2**30:.2f}" for size in found["main params"])
    assert f"{rounded} GiB instead of {ours}" in DOCS.read_text()
    assert all(ours < 0.82 * rounded for rounded, ours in found.values())
