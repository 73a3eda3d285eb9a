"""A stand-in for apex's ``amp_C``, which checks devices and strides and few dtypes, and uses 32-bit
indices except in Adam."""

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.standins import gpu
from support.standins.gpu import (
    GPU,
    F,
    Lists,
    SegmentationFaultError,
    as_float,
    as_int,
    fma,
    product,
    values,
)

_DEPTH = {1: 110, 2: 64, 3: 48, 4: 36}


def _check(lists: Lists) -> None:
    if not lists[0]:
        raise RuntimeError("tensor_lists[0].size() > 0 is false")
    if lists[0][0].device.type != GPU.device:
        raise RuntimeError("expected input to be on cuda")
    for tensors in lists:
        if len(tensors) != len(lists[0]):
            raise RuntimeError("Size mismatch among tensor lists")
        for tensor, first in zip(tensors, lists[0], strict=True):
            if tensor.device != lists[0][0].device:
                raise RuntimeError("A tensor was not on the same device as the first tensor")
            if not tensor.is_contiguous():
                raise RuntimeError("A tensor was not contiguous.")
            if tensor.numel() != first.numel():
                raise RuntimeError("Size mismatch")


def _misread(name: str, lists: Lists, believed: list[torch.dtype]) -> bool:
    """True if the kernel would read memory by the dtype of the first tensor instead of its own."""
    wrong = any(
        tensor.dtype != dtype
        for tensors, dtype in zip(lists, believed, strict=True)
        for tensor in tensors
    )
    if wrong:
        GPU.damage.append(f"{name}: memory of another dtype is taken for {believed}")
    return wrong


def _apply(chunk: int, lists: Lists, kernel: Any, wide: bool = False) -> None:
    gpu.walk(chunk, lists, _DEPTH[len(lists)], wide, kernel)


def _multi_tensor_adam(chunk: int, flag: Tensor, lists: Lists, *settings: Any) -> None:
    scalars = gpu.adam_scalars(*settings)
    gpu.begin("multi_tensor_adam", flag)
    _check(lists)
    kind = lists[0][0].dtype
    if _misread("adam", lists, [kind, kind, torch.float32, torch.float32]):
        return

    def kernel(_: int, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> None:
        stepped = gpu.adam(values(p), values(g), values(m), values(v), scalars)
        for tensor, array in zip((p, m, v), stepped, strict=True):
            gpu.store(tensor, array)

    _apply(chunk, lists, kernel, wide=True)


def _multi_tensor_scale(chunk: int, flag: Tensor, lists: Lists, scale: Any) -> None:
    scale = as_float(scale)
    gpu.begin("multi_tensor_scale", flag)
    _check(lists)
    if _misread("scale", lists, [lists[0][0].dtype, lists[1][0].dtype]):
        return

    def kernel(_: int, source: Tensor, target: Tensor) -> None:
        array = values(source)
        if not np.isfinite(array).all():
            flag.fill_(1)
        gpu.store(target, product(array, scale))

    _apply(chunk, lists, kernel)


def _multi_tensor_l2norm(
    chunk: int, flag: Tensor, lists: Lists, per_tensor: Any = None
) -> tuple[Tensor, Tensor]:
    gpu.begin("multi_tensor_l2norm", flag)
    if not lists[0]:
        raise SegmentationFaultError("tensor_lists[0][0] of an empty list")
    _check(lists)
    count = len(lists[0])
    if _misread("l2norm", lists, [lists[0][0].dtype]):
        return torch.full((1,), 7.0), torch.full((count,), 7.0)
    sums = np.zeros(count, dtype=F)

    def kernel(index: int, x: Tensor) -> None:
        partial = gpu.sum_of_squares(values(x))
        if not np.isfinite(partial):
            flag.fill_(1)
        sums[index] += partial

    _apply(chunk, lists, kernel)
    norms = torch.from_numpy(gpu.rooted(sums))
    return torch.from_numpy(
        gpu.rooted(np.array([sums.sum(dtype=F)]))
    ), norms if per_tensor else torch.zeros(0)


def _multi_tensor_sgd(chunk: int, flag: Tensor, lists: Lists, *settings: Any) -> None:
    scalars = gpu.sgd_scalars(*settings)
    gpu.begin("multi_tensor_sgd", flag)
    _check(lists)
    kind = (lists[0][0].dtype, lists[1][0].dtype, len(lists))
    half, full = torch.float16, torch.float32
    if kind not in ((half, half, 3), (full, full, 3), (half, full, 4), (full, full, 4)):
        raise RuntimeError(
            "multi_tensor_sgd only supports some combinations of gradient & weight types."
        )
    if _misread("sgd", lists[:3], [kind[0], kind[1], kind[1]]) or int(flag):
        return
    _apply(chunk, lists[:3], lambda _, g, p, m: gpu.sgd(g, p, m, *scalars))


def _multi_tensor_lamb(
    chunk: int,
    flag: Tensor,
    lists: Lists,
    lr: Any,
    beta1: Any,
    beta2: Any,
    eps: Any,
    step: Any,
    bias: Any,
    decay: Any,
    averaging: Any,
    mode: Any,
    norm: Tensor,
    limit: Any,
    nvlamb: Any = False,
) -> None:
    s = gpu.adam_scalars(lr, beta1, beta2, eps, step, mode, bias, decay)
    gpu.begin("multi_tensor_lamb", flag)
    _check(lists)
    kind = lists[0][0].dtype
    if kind not in (torch.float32, torch.float16):
        raise RuntimeError(f'"lamb_stage_1" not implemented for {kind}')
    if _misread("lamb", lists, [kind] * 4):
        return
    with np.errstate(divide="ignore"):
        clip = gpu.divided(F(norm), as_float(limit)) if float(norm) > limit else F(1)
    weight = F(1) - s["beta1"] if as_int(averaging) == 1 else F(1)
    grads, params = lists[:2]
    before = _multi_tensor_l2norm(chunk, flag, [params], True)[1].numpy()

    def first(_: int, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> None:
        grad, old = gpu.divided(values(g), clip), values(p)
        grad = fma(old, s["weight_decay"], grad) if s["mode"] == 0 else grad
        new_m = fma(grad, weight, product(values(m), s["beta1"]))
        new_v = fma(grad, product(F(1) - s["beta2"], grad), product(values(v), s["beta2"]))
        u = gpu.divided(
            gpu.divided(new_m, s["bc1"]), gpu.rooted(gpu.divided(new_v, s["bc2"])) + s["eps"]
        )
        u = fma(old, s["weight_decay"], u) if s["mode"] == 1 else u
        for tensor, array in zip((g, m, v), (u, new_m, new_v), strict=True):
            gpu.store(tensor, array)

    _apply(chunk, lists, first)
    after = _multi_tensor_l2norm(chunk, flag, [grads], True)[1].numpy()

    def second(index: int, u: Tensor, p: Tensor) -> None:
        adapts = (nvlamb or s["weight_decay"] != 0) and before[index] != 0 and after[index] != 0
        ratio = product(s["lr"], gpu.divided(before[index], after[index])) if adapts else s["lr"]
        gpu.store(p, fma(-ratio, values(u), values(p)))

    _apply(chunk, lists[:2], second)


def module() -> ModuleType:
    found = ModuleType("amp_C")
    for function in (
        _multi_tensor_adam,
        _multi_tensor_scale,
        _multi_tensor_l2norm,
        _multi_tensor_sgd,
        _multi_tensor_lamb,
    ):
        setattr(found, function.__name__.lstrip("_"), function)
    return found
