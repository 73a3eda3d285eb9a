"""A simulated GPU for the stand-ins: its arithmetic, and the order of chunks in multi-tensor
launches."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Lists = Sequence[Sequence[Tensor]]
F = np.float32
TINY = F(2.0**-126)


class SegmentationFaultError(BaseException):
    """The real process would be dead, so no test may continue after this error."""


class Gpu:
    """The state of a simulated GPU library.

    Attributes:
        device: device type of its tensors.
        int_max: elements that 32-bit indices reach.
        damage: faults that the real library would not report.
        calls: names of the kernels called.
        flags: the skip flags they were called with.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.device, self.int_max, self.max_blocks = "cpu", 2**31 - 1, 320
        self.damage: list[str] = []
        self.calls: list[str] = []
        self.flags: list[int] = []


GPU = Gpu()


def fma(a: Any, b: Any, c: Any) -> Array:
    with np.errstate(invalid="ignore"):
        return flushed((np.float64(a) * np.float64(b) + np.float64(c)).astype(F))


def flushed(x: Array) -> Array:
    return np.where(np.abs(x) < TINY, np.copysign(F(0), x), x).astype(F)


def _rough(x: Array) -> Array:
    odd = (np.ascontiguousarray(x).view(np.uint32).reshape(x.shape) >> 3) & 1
    return np.where(odd == 1, np.nextafter(x, np.where(x > 0, F(np.inf), F(-np.inf))), x).astype(F)


def divided(a: Any, b: Any) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        exact = flushed((np.float64(a) / np.float64(b)).astype(F))
    return np.where(np.broadcast_to(np.asarray(b) == 1, exact.shape), exact, _rough(exact))


def rooted(x: Array) -> Array:
    return _rough(flushed(np.sqrt(np.float64(x)).astype(F)))


def product(a: Any, b: Any) -> Array:
    return flushed(np.asarray(F(1) * a * b, dtype=F))


def values(tensor: Tensor) -> Array:
    return tensor.float().numpy().copy()


def store(tensor: Tensor, array: Array) -> None:
    tensor.data.copy_(torch.from_numpy(np.ascontiguousarray(array)))


def as_float(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"incompatible function arguments: {type(value).__name__} for float")
    return F(value)


def as_int(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"incompatible function arguments: {type(value).__name__} for int")
    return int(value)


def begin(name: str, flag: Tensor) -> None:
    GPU.calls.append(name)
    GPU.flags.append(int(flag))
    if flag.dtype != torch.int32 or flag.device.type != GPU.device:
        GPU.damage.append(f"{name}: the flag is {flag.dtype} on {flag.device}")


def flat_memory(tensor: Tensor) -> Tensor:
    end = tensor.storage_offset() + tensor.numel()
    if end * tensor.itemsize > tensor.untyped_storage().nbytes():
        GPU.damage.append("memory behind the tensor is written")
        return torch.zeros(tensor.numel(), dtype=tensor.dtype)
    if not tensor.is_contiguous():
        GPU.damage.append("elements of a strided tensor are mixed up")
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())


def walk(
    chunk: int, lists: Lists, most_tensors: int, wide: bool, kernel: Callable[..., None]
) -> None:
    """Collect chunks of tensors until a launch is full or the last chunk of the last tensor was
    added.

    An empty last tensor therefore drops all collected chunks. An empty tensor in the last place of
    a launch's table is written behind the table.
    """
    blocks: list[tuple[int, int]] = []
    placed = 0
    last = len(lists[0]) - 1
    for index, first in enumerate(lists[0]):
        if first.numel() > GPU.int_max and not wide:
            GPU.damage.append("an index wraps around")
            return
        placed += 1
        if placed > most_tensors:
            GPU.damage.append("the host's stack is written behind the table of tensors")
            return
        chunks = -(-first.numel() // chunk)
        for at in range(chunks):
            blocks.append((index, at * chunk))
            full = len(blocks) == GPU.max_blocks or (placed == most_tensors and at == chunks - 1)
            if full or (index == last and at == chunks - 1):
                _run(blocks, lists, chunk, kernel)
                placed = 0 if at == chunks - 1 else 1
                blocks = []


def _run(
    blocks: list[tuple[int, int]], lists: Lists, chunk: int, kernel: Callable[..., None]
) -> None:
    for index, start in blocks:
        count = min(chunk, lists[0][index].numel() - start)
        kernel(index, *(flat_memory(tensors[index])[start : start + count] for tensors in lists))


def bias_correction(beta: Any, step: int, wanted: int) -> Any:
    return F(1 - np.float64(F(beta)) ** step) if wanted == 1 else F(1)


def adam(
    p: Array, g: Array, m: Array, v: Array, scalars: dict[str, Any]
) -> tuple[Array, Array, Array]:
    b1, b2, lr, wd, mode = (scalars[k] for k in ("beta1", "beta2", "lr", "weight_decay", "mode"))
    if mode == 0:
        g = fma(p, wd, g)
    m = fma(m, b1, product(F(1) - b1, g))
    v = fma(v, b2, product(g, product(F(1) - b2, g)))
    d = rooted(divided(v, scalars["bc2"])) + scalars["eps"]
    u = divided(divided(m, scalars["bc1"]), d)
    u = fma(p, wd, u) if mode == 1 else u
    return fma(-u, lr, p), m, v


def adam_scalars(
    lr: Any, beta1: Any, beta2: Any, eps: Any, step: Any, mode: Any, bias: Any, decay: Any
) -> dict[str, Any]:
    step, bias = as_int(step), as_int(bias)
    return {
        "lr": as_float(lr),
        "beta1": as_float(beta1),
        "beta2": as_float(beta2),
        "eps": as_float(eps),
        "mode": as_int(mode),
        "weight_decay": as_float(decay),
        "bc1": bias_correction(beta1, step, bias),
        "bc2": bias_correction(beta2, step, bias),
    }


def sgd_scalars(
    decay: Any,
    momentum: Any,
    dampening: Any,
    lr: Any,
    nesterov: Any,
    first: Any,
    decay_after: Any,
    scale: Any,
) -> list[Any]:
    numbers = map(as_float, (decay, momentum, dampening, lr))
    return [*numbers, bool(as_int(nesterov)), bool(as_int(first)), as_float(scale)]


def sgd(
    grad: Tensor,
    param: Tensor,
    buffer: Tensor,
    decay: Any,
    momentum: Any,
    dampening: Any,
    lr: Any,
    nesterov: bool,
    first: bool,
    scale: Any,
) -> None:
    g, p, m = product(values(grad), scale), values(param), values(buffer)
    if decay != 0:
        g = fma(p, decay, g)
    if momentum != 0:
        m = g if first else fma(m, momentum, product(F(1) - dampening, g))
        g = fma(m, momentum, g) if nesterov else m
        store(buffer, m)
    store(param, fma(-lr, g, p))


def sum_of_squares(array: Array) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add.reduce(product(array, array), dtype=F)
