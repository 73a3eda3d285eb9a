"""Simulated devices that keep their memory on the host."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mp_optim.core.read_only import ReadOnlyTensor
from support.accelerator.simulation import KIND, Simulation, device_at

_DEVICE, _IS_CPU = Tensor.device.__get__, Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_HOST = torch.device("cpu")
_PLAIN = Tensor, torch.nn.Parameter, ReadOnlyTensor
"""Classes of tensors with their own memory. Wrappers such as DTensor call these tensors."""


class Devices(TorchFunctionMode):
    """A function mode for one thread: host tensors act as tensors of simulated devices."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {**(kwargs or {})}
        if isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # The simulation has recorded this operation already.
        is_plain = bool(args) and type(args[0]) in _PLAIN
        if func == _DEVICE and is_plain:
            return self._place(args[0])
        if func == _IS_CPU and is_plain:
            return self._place(args[0]) == _HOST
        if func in (Tensor.to, Tensor.cpu) and is_plain:
            return self._to(func, *args, **kwargs)
        if kwargs.get("device") is None:
            return self._beside(args, func(*args, **kwargs))
        device = self._whole(kwargs.pop("device"))
        if is_plain:
            return self._like(func, device, *args, **kwargs)
        return self._made(func(*args, device=_real(device), **kwargs), device)

    def _beside(self, args: Any, made: Any) -> Any:
        if args and isinstance(made, Tensor) and not made.numel():
            first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
            if isinstance(first, Tensor):
                self._made(made, self._place(first))
        return made

    def _place(self, tensor: Tensor) -> torch.device:
        device: torch.device = _DEVICE(tensor)
        if device != _HOST:
            return device
        if not tensor.numel():
            index = self._simulation.empty.get(tensor)
            return device if index is None else device_at(index)
        region = self._simulation.memory.at(tensor.data_ptr())
        return device if region is None or region.device is None else device_at(region.device)

    def _whole(self, device: Any) -> torch.device:
        device = torch.device(device)
        is_ours = device.type == KIND and device.index is None
        return device_at(self._simulation.thread.device) if is_ours else device

    def _made(self, tensor: Any, device: torch.device) -> Any:
        if device.type == KIND:
            self._simulation.to_device(tensor, device.index)
        return tensor

    def _like(
        self, func: Any, device: torch.device, like: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if func in (torch.as_tensor, torch.tensor):
            return self._to(Tensor.to, like, device, **kwargs)
        if device == self._place(like):
            return func(like, *args, **kwargs)
        alike = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        return self._made(func(alike, *args, device=_real(device), **kwargs), device)

    def _to(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = kwargs.pop("copy", False)
        if func == Tensor.cpu:
            args = (_HOST,)
        elif args and isinstance(args[0], Tensor):
            args = (self._place(args[0]), args[0].dtype, *args[1:])
        if len(args) > 3 or (len(args) > 2 and isinstance(args[0], torch.dtype)):
            *args, copy = args
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        dtype = tensor.dtype if dtype is None else dtype
        layout = torch.preserve_format if layout is None else layout
        device = self._place(tensor) if device is None else self._whole(device)
        if device == self._place(tensor) or _real(device) != _HOST:
            return Tensor.to(tensor, _real(device), dtype, non_blocking, copy, memory_format=layout)
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
        return self._made(made, device).copy_(tensor, non_blocking)


def _real(device: torch.device) -> torch.device:
    return _HOST if device.type == KIND else device
