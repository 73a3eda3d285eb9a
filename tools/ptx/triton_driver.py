"""A driver for Triton whose device is the emulator. Triton compiles for a GPU as usual, and each
launch is recorded, or executed from its PTX."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from ptx import parser
from ptx.machine import execute
from ptx.memory import GlobalMemory, piece_of

_MULTIPLE = ["tt.divisibility", 16]
"""Triton's attribute of an argument that is a multiple of 16."""
_SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Largest shared memory of a block in bytes, by target."""


@dataclass(frozen=True)
class Function:
    """A compiled kernel, ready to be loaded."""

    name: str
    ptx: str
    cubin: bytes
    warps: int = 0


@dataclass(frozen=True)
class Launch:
    """A launch of a compiled kernel.

    Attributes:
        constants: compiled-in values, by the names of arguments.
        signature: types of all arguments by name, also of constants.
        divisible: arguments that are promised to be multiples of 16.
        grid: number of blocks.
        shared: bytes of a block's shared memory.
        arguments: arguments that are not constants.
    """

    function: Function
    constants: dict[str, Any]
    signature: dict[str, str]
    divisible: frozenset[str]
    grid: int
    warps: int
    shared: int
    arguments: dict[str, Any]


Carry = Callable[[Launch], None]
"""Function that records or executes a launch."""


class StaticDriver:
    """Driver that is active while its context is open.

    Args:
        arch: compute capability to compile for.
        carry: function that gets each launch.
    """

    def __init__(self, arch: int, carry: Carry) -> None:
        self.arch, self.carry = arch, carry
        self.utils = self  # Triton calls the methods below on a driver's utilities.
        self._files: dict[str, str] = {}
        triton.knobs.runtime.kernel_load_start_hook.add(self._found)

    def __enter__(self) -> StaticDriver:
        driver.set_active(self)
        return self

    def __exit__(self, *_: object) -> None:
        triton.knobs.runtime.kernel_load_start_hook.remove(self._found)

    def _found(self, module: Any, function: Any, name: str, files: Any, key: str) -> None:
        self._files = {Path(path).suffix: path for path in files.values()}

    # -- methods that Triton calls -----------------------------------------------------------------

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton caches kernels by device.

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": _SHARED[self.arch]}

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[object, Function, int, int, int]:
        function = Function(name, Path(self._files[".ptx"]).read_text(), binary)
        return self, function, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        names = list(source.signature)
        constants = {names[path[0]]: value for path, value in source.constants.items()}
        promised = {names[path[0]] for path, said in source.attrs.items() if _MULTIPLE in said}
        signature = {name: str(kind) for name, kind in source.signature.items()}

        def launch(
            grid: int, _y: int, _z: int, _stream: Any, function: Function, *rest: Any
        ) -> None:
            given = dict(zip(names, rest[4:], strict=True))
            arguments = {
                name: value for name, value in given.items() if signature[name] != "constexpr"
            }
            current = driver.active
            assert isinstance(current, StaticDriver)
            current.carry(
                Launch(
                    function,
                    constants,
                    signature,
                    frozenset(promised),
                    grid,
                    metadata.num_warps,
                    metadata.shared,
                    arguments,
                )
            )

        return launch


def bits_of(value: Any, kind: str) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if kind in ("fp32", "fp64"):
        letter = "f" if kind == "fp32" else "d"
        return int.from_bytes(struct.pack(f"<{letter}", value), "little")
    return int(value) & (2**64 - 1)


def carry_out(
    launch: Launch,
    others: Iterable[torch.Tensor] = (),
    exact: bool = True,
    text: Callable[[Launch], str] | None = None,
) -> Counter[str]:
    """Execute a launch on tensors in host memory, and return its number of instructions by name.

    Args:
        others: tensors that the kernel may access in addition to its arguments.
        exact: True if an approximate instruction is an error.
        text: function that returns PTX to execute in place of the launch's.

    Raises:
        PtxError: the kernel has a refused instruction or access.
    """
    ptx = launch.function.ptx if text is None else text(launch)
    program = parser.parse(ptx)
    given = [bits_of(value, launch.signature[name]) for name, value in launch.arguments.items()]
    scratch = len(program.params) - len(given)  # Triton's own, which no kernel here uses.
    tensors = [each for each in launch.arguments.values() if isinstance(each, torch.Tensor)]
    memory = GlobalMemory(piece_of(each) for each in [*tensors, *others])
    threads = 32 * launch.warps
    arguments = [*given, *[0] * scratch]
    done = execute(program, arguments, launch.grid, threads, launch.shared, memory, exact)
    memory.give_back()
    return done.opcodes
