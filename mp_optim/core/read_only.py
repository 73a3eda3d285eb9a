"""Tensors that ``optimizer.state`` exports as copies, and that callers may only read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from mp_optim.host.host_memory import same_values

_READ_ONLY = (
    "optimizer.state: this FP32 copy of a moment in float16, 8 or 4 bits is read-only; assign the "
    "new values: optimizer.state[param][key] = values"
)


_NO_WRITES = "requires_grad_", "share_memory_"
"""Names of operations that end in an underscore and write no values."""


class ReadOnlyTensor(Tensor):
    """A copy of state that raises for writes, because a write to a copy would be lost.

    NOTE: writes through the storage, DLPack or a list that is not the first argument are not seen.
    The tensor is made in inference mode, so torch refuses some of these writes.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        written = [kwargs.get("out")]
        if name == "__setitem__" or (
            name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
        ):
            written.append(args[0] if args else kwargs.get("self", kwargs.get("input")))
        if any(isinstance(each, cls) for each in tree_iter(written)):
            raise RuntimeError(_READ_ONLY)
        own = {_memory(_plain(each)) for each in tree_iter((args, kwargs)) if isinstance(each, cls)}
        args, kwargs = tree_map_only(cls, _plain, (args, kwargs))

        def guarded(result: Tensor) -> Tensor:
            is_view = type(result) is Tensor and _memory(result) in own
            return result.as_subclass(cls) if is_view else result

        result = func(*args, **kwargs)
        # A tree map would turn a torch.Size into a tuple, so map results with tensors only.
        has_tensors = any(isinstance(each, Tensor) for each in tree_iter(result))
        return tree_map_only(Tensor, guarded, result) if has_tensors else result

    def detach(self) -> Tensor:
        return self

    def numpy(self, *, force: bool = False) -> Any:
        array = _plain(self).numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        # Programs move state to another device by assigning ``.data``. Ignore such an assignment if
        # it has the same values: this tensor is only a copy, so it stays on its device. Other
        # values would be lost, so raise.
        if value.shape != self.shape or not same_values(value.to(self.device), _plain(self)):
            raise RuntimeError(_READ_ONLY)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return _plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = _plain(self).clone()
        return plain.__reduce_ex__(protocol)


def _memory(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's storage; None for a tensor without one."""
    has_storage = tensor.layout == torch.strided
    return tensor.untyped_storage()._cdata if has_storage else None


def _plain(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor of torch's class."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)
