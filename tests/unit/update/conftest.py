"""Libraries that are not here, as stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from mp_optim.update.backends import forget, multi_tensor
from support.standins import amp_c, te
from support.standins.gpu import GPU, Gpu


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Apex and Transformer Engine as installed, on a pretended GPU whose memory is the CPU's."""
    GPU.reset()
    monkeypatch.setattr(multi_tensor, "KERNEL_DEVICE", "cpu")
    monkeypatch.setitem(sys.modules, "amp_C", amp_c.module())
    for name, module in te.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    forget()
    yield GPU
    forget()
