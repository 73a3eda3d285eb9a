"""Our Triton backend on the machine: it compiles for a target, and its launches are handed to
whoever carries them out, on tensors in host memory.

Has to be imported before anything that interprets kernels: a process compiles them or interprets
them.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

if "mp_optim.kernels.triton.kernels" in sys.modules:
    raise ImportError("this process has imported the kernels, to be interpreted or for a GPU")
os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is defined

import torch
from torch import Tensor

from mp_optim.kernels.triton.backend import TritonBackend
from mp_optim.kernels.triton.tables import Column, Tables
from ptx.triton_driver import Launch, carry_out

os.environ["TRITON_INTERPRET"] = "1"  # read by those who ask where the backend's tensors are


class _WatchedTables(Tables):
    """Tables that know which tensors the addresses in them are of."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, list[weakref.ref[Tensor]]] = {}

    def column(self, tensors: Sequence[Tensor], device: torch.device) -> Column:
        column = super().column(tensors, device)
        self._tensors[column.values.data_ptr()] = [weakref.ref(tensor) for tensor in tensors]
        return column

    def read_by(self, launch: Launch) -> list[Tensor]:
        found: list[Tensor] = []
        for value in launch.arguments.values():
            if isinstance(value, Tensor) and value.dtype == torch.int64:
                held = (each() for each in self._tensors.get(value.data_ptr(), ()))
                found.extend(each for each in held if each is not None)
        return found


class MachineBackend(TritonBackend):
    """The backend of a :class:`~ptx.triton_driver.StaticDriver` that is active.

    Attributes:
        text: the PTX that is carried out in place of a launch's.
    """

    def __init__(self) -> None:
        available = torch.cuda.is_available
        torch.cuda.is_available = lambda: True
        try:
            super().__init__()
        finally:
            torch.cuda.is_available = available
        self.device_type = "cpu"
        self._watched = _WatchedTables()
        self.tables = self._watched
        self.text: Callable[[Launch], str] | None = None

    def carry_out(self, launch: Launch) -> None:
        """Carry a launch out, to the bit."""
        carry_out(launch, self._watched.read_by(launch), text=self.text)

    def pass_by(self, launch: Launch) -> None:
        made: Any = launch.arguments.get("made")
        if isinstance(made, Tensor):
            made.zero_()
