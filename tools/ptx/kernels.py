"""Our Triton backend on the emulator: it compiles for a target, and the active driver executes its
launches on tensors in host memory.

Import this module before any module that interprets kernels, because a process can only compile or
only interpret them.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

if "mp_optim.kernels.triton.kernels" in sys.modules:
    raise ImportError("this process has imported the kernels, to be interpreted or for a GPU")
os.environ["TRITON_INTERPRET"] = "0"  # Triton reads it when a kernel is defined.

import torch
from torch import Tensor

from mp_optim.kernels.triton.backend import TritonBackend
from mp_optim.kernels.triton.tables import Column, Tables
from ptx.triton_driver import Launch, carry_out

os.environ["TRITON_INTERPRET"] = "1"  # The backend reads it to accept tensors in host memory.


class _WatchedTables(Tables):
    """Tables that remember the tensors of their addresses."""

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
        text: function that returns PTX to execute in place of a launch's.
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
        """Execute a launch."""
        carry_out(launch, self._watched.read_by(launch), text=self.text)

    def pass_by(self, launch: Launch) -> None:
        made: Any = launch.arguments.get("made")
        if isinstance(made, Tensor):
            made.zero_()
