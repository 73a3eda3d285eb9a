"""Fixtures with stand-ins for apex and Transformer Engine."""

import sys
from collections.abc import Iterator
from functools import cache

import pytest

from mp_optim.kernels import multi_tensor, selection
from support.standins import amp_c, te
from support.standins.gpu import GPU, Gpu

# Proofs of faultless stand-ins are cached: interpreting Triton's proof takes two seconds.
_prove = selection._proven.__wrapped__
_of_faultless = cache(_prove)


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    GPU.reset()
    monkeypatch.setattr(multi_tensor, "KERNEL_DEVICE", "cpu")
    monkeypatch.setitem(sys.modules, "amp_C", amp_c.module())
    for name, module in te.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(selection, "_proven", cache(_prove))
    selection.choose_backend.cache_clear()
    yield GPU
    selection.choose_backend.cache_clear()


@pytest.fixture
def faultless_standins(standins: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(selection, "_proven", _of_faultless)
    return standins
