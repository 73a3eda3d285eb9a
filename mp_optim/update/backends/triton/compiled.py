"""Launches of kernels that Triton has compiled.

Before each launch Triton works out, from every argument and constant, which of its compiled kernels
is asked for: some 50 microseconds of Python. So each is kept here by what it was compiled for, and
launched as it is from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

MULTIPLE = 16
"""Triton compiles one kernel for pointers that are multiples of it, and one for others."""


@dataclass(frozen=True, eq=False)
class KernelForm:
    """A kernel with what is compiled into it.

    Attributes:
        constants: the last arguments of the kernel, in their order.
        options: of the compiler.
        compiled: by device and by what Triton goes by beside constants: of pointers whether they
            are there, and multiples of 16; of all else the type.
    """

    kernel: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    compiled: dict[tuple[Any, ...], CompiledKernel] = field(default_factory=dict)

    def launch(self, programs: int, *arguments: Any) -> None:
        """Launch so many programs on the current device, on its current stream."""
        if not isinstance(self.kernel, JITFunction):  # it is interpreted
            self.kernel[(programs,)](*arguments, **self.constants, **self.options)
            return
        key = (driver.active.get_current_device(), *map(_compiled_for, arguments))
        known = self.compiled.get(key)
        if known is not None:
            known[(programs, 1, 1)](*arguments, *self.constants.values())
            return
        made = self.kernel[(programs,)](*arguments, **self.constants, **self.options)
        if isinstance(made, CompiledKernel) and made.module is not None:  # it was launched
            self.compiled[key] = made


def _compiled_for(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % MULTIPLE == 0
    return type(argument)
