"""A driver for Triton whose device is the machine: Triton compiles for a GPU as it does anywhere,
and what it then launches is noted, or carried out from its PTX."""

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
"""How Triton says that an argument is a multiple of 16."""
_SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes a block may have, by target."""


@dataclass(frozen=True)
class Function:
    """A kernel as it would be loaded."""

    name: str
    ptx: str
    cubin: bytes
    warps: int = 0


@dataclass(frozen=True)
class Launch:
    """A kernel with what Triton compiled into it, and on what it is launched.

    Attributes:
        constants: by the names of arguments.
        signature: types of arguments by name; those that are constants among them.
        divisible: arguments that are promised to be multiples of 16.
        grid: blocks.
        shared: bytes of a block's memory.
        arguments: those that are no constants.
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
"""What is done with a launch."""


class StaticDriver:
    """Args:
    carry: what is done with each launch.
    """

    def __init__(self, arch: int, carry: Carry) -> None:
        self.arch, self.carry = arch, carry
        self.utils = self  # what Triton asks of a driver's utilities is below
        self._files: dict[str, str] = {}
        triton.knobs.runtime.kernel_load_start_hook.add(self._found)

    def __enter__(self) -> StaticDriver:
        driver.set_active(self)
        return self

    def __exit__(self, *_: object) -> None:
        triton.knobs.runtime.kernel_load_start_hook.remove(self._found)

    def _found(self, module: Any, function: Any, name: str, files: Any, key: str) -> None:
        self._files = {Path(path).suffix: path for path in files.values()}

    # -- what Triton asks -------------------------------------------------------------------------

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # kernels are kept by device

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
    """Carry out a launch on tensors in host memory; returns its instructions by name.

    Args:
        others: tensors that it may touch beside its arguments.
        exact: an approximate instruction is an error.
        text: the PTX to carry out in place of the launch's.

    Raises:
        PtxError: the kernel does what it must not.
    """
    ptx = launch.function.ptx if text is None else text(launch)
    program = parser.parse(ptx)
    given = [bits_of(value, launch.signature[name]) for name, value in launch.arguments.items()]
    scratch = len(program.params) - len(given)  # Triton's own, which nothing here uses
    tensors = [each for each in launch.arguments.values() if isinstance(each, torch.Tensor)]
    memory = GlobalMemory(piece_of(each) for each in [*tensors, *others])
    threads = 32 * launch.warps
    arguments = [*given, *[0] * scratch]
    done = execute(program, arguments, launch.grid, threads, launch.shared, memory, exact)
    memory.give_back()
    return done.opcodes
