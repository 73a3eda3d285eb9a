"""Raise an error at each host synchronization, on machines without a GPU.

Under Triton's interpreter device tensors are CPU tensors, so every conversion of a tensor to a
number raises.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mp_optim.offload.hybrid_executor import PlacedExecutor

_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.numpy,
    Tensor.cpu,
    Tensor.__contains__,
    Tensor.__array__,
    torch.equal,
    Tensor.equal,
    torch.allclose,
    torch.nonzero,
    Tensor.nonzero,
    torch.masked_select,
    torch.unique,
    Tensor.is_nonzero,
}
_READING_KERNELS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
}


_MAKERS = {torch.tensor, torch.as_tensor}


class WaitedError(AssertionError):
    """The host read a device tensor."""


class _Functions(TorchFunctionMode):
    def __init__(self, on_host: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__()
        self._on_host = on_host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The literal "cpu" means the host; a device object stands for the accelerator.
        made = func in _MAKERS and (kwargs or {}).get("device") not in (None, "cpu")
        # A copy from memory that is not page-locked waits for the device.
        if made and not isinstance(args[0], Tensor):
            raise WaitedError(f"{func.__name__} of host values on a device")
        if func in _READS:
            hosted = {tensor.untyped_storage().data_ptr() for tensor in self._on_host()}
            if any(
                isinstance(a, Tensor) and a.untyped_storage().data_ptr() not in hosted for a in args
            ):
                raise WaitedError(
                    f"{func.__name__} of {[a.shape for a in args if isinstance(a, Tensor)]}"
                )
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _READING_KERNELS:
            raise WaitedError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch, *optimizers: Any) -> Iterator[None]:
    from triton.runtime.interpreter import GridExecutor

    from mp_optim.kernels import sums
    from mp_optim.kernels.triton import backend
    from mp_optim.mixed_precision import clip_and_skip as verdict

    modes: list[Any] = []

    def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                if modes:
                    stack.enter_context(torch._C.DisableTorchFunction())
                    stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
                return function(*args, **kwargs)

        return run

    def counters() -> list[Tensor]:
        return [steps for optimizer in optimizers for steps in _steps(optimizer)]

    newest: list[Any] = []
    create = verdict.DeviceVerdict.__init__
    wait = unwatched(verdict.DeviceVerdict.wait)

    def created(self: Any, *args: Any) -> None:
        create(self, *args)
        newest[:] = [self]

    def waited(self: Any) -> Any:
        if modes and newest == [self] and self._verdict is None:
            raise WaitedError("the verdict of this very step was asked for")
        return wait(self)

    with monkeypatch.context() as patch:
        patch.setattr(verdict.DeviceVerdict, "__init__", created)
        patch.setattr(verdict.DeviceVerdict, "wait", waited)
        patch.setattr(GridExecutor, "__call__", unwatched(GridExecutor.__call__))
        for module in (verdict, backend, sums):
            patch.setattr(module, "root", unwatched(module.root))
        with _Functions(counters) as functions, _Kernels() as kernels:
            modes[:] = [functions, kernels]
            yield
            modes.clear()


def _steps(optimizer: Any) -> Iterator[Tensor]:
    for part in optimizer.chained_optimizers:
        executor = part.executor
        if isinstance(executor, PlacedExecutor):
            executor = executor.executors["device"]
        for group in executor.rows.groups:
            yield group.steps
