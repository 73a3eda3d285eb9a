"""Tensors that ``optimizer.state`` exports as copies, and that callers may only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mp_optim.host.host_memory import same_values

_READ_ONLY = (
    "optimizer.state: this FP32 copy of a moment in float16, 8 or 4 bits is read-only; assign the "
    "new values: optimizer.state[param][key] = values"
)


class ReadOnlyTensor(Tensor):
    """A copy of state that raises for writes, because a write to a copy would be lost.

    NOTE: the tensor is made in inference mode, so torch also refuses writes that this class does
    not see, for example by ``out=``. Views of the tensor are tensors of inference mode, too.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.startswith("__")):
            written = args[0] if isinstance(args[0], list | tuple) else args[:1]
            if any(isinstance(each, cls) for each in written):
                raise RuntimeError(_READ_ONLY)
        args, kwargs = tree_map_only(cls, _plain, (args, kwargs or {}))
        return tree_map_only(Tensor, _guarded, func(*args, **kwargs))

    def detach(self) -> Tensor:
        return self

    def numpy(self, *, force: bool = False) -> Any:
        array = _plain(self).numpy(force=force)
        array.flags.writeable = False
        return array

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        # Programs move state to another device by assigning ``.data``. Ignore such an assignment if
        # it has
        # the same values: this tensor is only a copy, so it stays on its device. Other values would
        # be lost,
        # so raise.
        if value.shape != self.shape or not same_values(value.to(self.device), _plain(self)):
            raise RuntimeError(_READ_ONLY)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return _plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = _plain(self).clone()
        return plain.__reduce_ex__(protocol)


def _guarded(result: Tensor) -> Tensor:
    """Return a view of a read-only tensor as a read-only tensor, and other results unchanged."""
    is_view = result.is_inference() and not torch.is_inference_mode_enabled()
    return result.as_subclass(ReadOnlyTensor) if is_view else result


def _plain(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor of torch's class."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)
