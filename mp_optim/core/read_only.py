"""Tensors that ``optimizer.state`` exports as copies, and that callers may only read."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

_READ_ONLY = (
    "optimizer.state: this FP32 copy of a moment in float16, 8 or 4 bits is read-only; assign the "
    "new values: optimizer.state[param][key] = values"
)


class ReadOnlyTensor(Tensor):
    """A copy of state that raises for writes, because a write to a copy would be lost.

    NOTE: the tensor is created in inference mode, and torch refuses operations in place on such
    tensors. This class also refuses writes through ``.data``, ``detach()`` and numpy, which torch
    allows.
    """

    # With this setting, results of operations are plain tensors, which callers may write.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def detach(self) -> ReadOnlyTensor:
        return self

    def numpy(self, *, force: bool = False) -> Any:
        array = self.as_subclass(Tensor).numpy(force=force)
        array.flags.writeable = False
        return array

    @property
    def data(self) -> NoReturn:
        raise RuntimeError(_READ_ONLY)

    @data.setter
    def data(self, value: Tensor) -> NoReturn:
        raise RuntimeError(_READ_ONLY)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor).clone()
        return plain.__reduce_ex__(protocol)
