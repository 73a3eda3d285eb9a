"""Libraries that are not here, as stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache

import pytest

from mp_optim.update.backends import multi_tensor, selection
from support.standins import amp_c, te
from support.standins.gpu import GPU, Gpu

PROOFS = ("_proven", "_chosen")
"""What is remembered of backends: a proof of Triton's by its interpreter takes two seconds."""
_of_faultless = {name: cache(getattr(selection, name).__wrapped__) for name in PROOFS}


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Apex and Transformer Engine as installed, on a pretended GPU whose memory is the CPU's.
    Nothing is proven of them yet; what was proven without them holds again afterwards."""
    GPU.reset()
    monkeypatch.setattr(multi_tensor, "KERNEL_DEVICE", "cpu")
    monkeypatch.setitem(sys.modules, "amp_C", amp_c.module())
    for name, module in te.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in PROOFS:
        monkeypatch.setattr(selection, name, cache(getattr(selection, name).__wrapped__))
    yield GPU


@pytest.fixture
def faultless_standins(standins: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Those of tests that change nothing about them: proven once."""
    for name, found in _of_faultless.items():
        monkeypatch.setattr(selection, name, found)
    return standins
