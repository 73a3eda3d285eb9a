"""A stand-in for ``transformer_engine_torch``, which checks dtypes but no device, stride or size,
and takes one handle per tensor."""

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.standins import gpu
from support.standins.gpu import GPU, F, Lists, SegmentationFaultError, as_float, product, values

HANDLES = 20_000
_DEPTH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


def _begin(name: str, flag: Tensor, lists: Lists) -> bool:
    gpu.begin(name, flag)
    if not lists[0]:
        raise SegmentationFaultError("tensor_lists[0][0] of an empty list")
    if sum(map(len, lists)) > HANDLES:
        raise RuntimeError("Cannot allocate a new NVTETensor. Maximum number of tensors reached.")
    elsewhere = {tensor.device.type for tensors in lists for tensor in tensors} != {GPU.device}
    if elsewhere:
        GPU.damage.append(f"{name}: host memory is written by the GPU")
    return not elsewhere


def _expect(what: str, tensors: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in dtypes:
            raise RuntimeError(
                f"{what} tensor {index} has dtype={tensor.dtype}, but expected dtype={dtypes}"
            )


def _check_adam(lists: Lists) -> None:
    _expect("Grad", lists[0], (lists[0][0].dtype,))
    _expect("Param", lists[1], (lists[1][0].dtype,))
    moments = lists[2][0].dtype
    if moments not in (torch.float32, torch.bfloat16) or {
        t.dtype for x in lists[2:4] for t in x
    } != {moments}:
        raise RuntimeError(
            "First and second moment tensors must both be Float32 or both be BFloat16"
        )


def _multi_tensor_adam(chunk: int, flag: Tensor, lists: Lists, *settings: Any) -> None:
    scalars = gpu.adam_scalars(*settings)
    if not _begin("multi_tensor_adam", flag, lists):
        return
    _check_adam(lists)
    if len(lists) == 5:
        _expect("Master param", lists[4], (torch.float32,))

    def kernel(
        _: int, g: Tensor, p: Tensor, m: Tensor, v: Tensor, master: Tensor | None = None
    ) -> None:
        old = values(p if master is None else master)
        new_p, new_m, new_v = gpu.adam(old, values(g), values(m), values(v), scalars)
        for tensor, array in ((p, new_p), (m, new_m), (v, new_v), (master, new_p)):
            if tensor is not None:
                gpu.store(tensor, array)

    gpu.walk(chunk, lists, _DEPTH[len(lists)], True, kernel)


def _multi_tensor_adam_param_remainder(
    chunk: int, flag: Tensor, lists: Lists, *settings: Any
) -> None:
    scalars = gpu.adam_scalars(*settings)
    if not _begin("multi_tensor_adam_param_remainder", flag, lists):
        return
    _check_adam(lists)
    _expect("Param", lists[1], (torch.bfloat16,))
    _expect("Param remainder", lists[4], (torch.int16,))

    def kernel(_: int, g: Tensor, p: Tensor, m: Tensor, v: Tensor, rest: Tensor) -> None:
        high, low = p.view(torch.int16).numpy().copy(), rest.numpy().copy()
        # A negative remainder means that the upper half was rounded up.
        high = np.where(low < 0, high - 1, high).astype(np.int16)
        bits = (high.view(np.uint16).astype(np.uint32) << 16) | low.view(np.uint16)
        stepped, new_m, new_v = gpu.adam(
            gpu.flushed(bits.view(F)), values(g), values(m), values(v), scalars
        )
        bits = np.where(np.isnan(stepped), np.uint32(0x7FFFFFFF), stepped.view(np.uint32))
        low = (bits & 0xFFFF).astype(np.uint16).view(np.int16)
        high = ((bits >> 16) + (low < 0)).astype(np.uint16).view(np.int16)
        p.data.view(torch.int16).copy_(torch.from_numpy(high))
        rest.data.copy_(torch.from_numpy(low))
        gpu.store(m, new_m)
        gpu.store(v, new_v)

    gpu.walk(chunk, lists, _DEPTH[5], True, kernel)


def _multi_tensor_scale(chunk: int, flag: Tensor, lists: Lists, scale: Any) -> None:
    scale = as_float(scale)
    if _begin("multi_tensor_scale", flag, lists):
        gpu.walk(
            chunk,
            lists,
            _DEPTH[2],
            False,
            lambda _, source, target: gpu.store(target, product(values(source), scale)),
        )


def _multi_tensor_l2norm(
    chunk: int, flag: Tensor, lists: Lists, per_tensor: Any = None
) -> tuple[Tensor, Tensor]:
    sums = np.zeros(len(lists[0]), dtype=F)

    def kernel(index: int, x: Tensor) -> None:
        sums[index] += gpu.sum_of_squares(values(x))

    if _begin("multi_tensor_l2norm", flag, lists):
        if len({tensor.dtype for tensor in lists[0]}) != 1:
            GPU.damage.append(
                "l2norm: memory of another dtype is taken for that of the first tensor"
            )
        gpu.walk(chunk, lists, _DEPTH[1], False, kernel)
    norms = torch.from_numpy(gpu.rooted(sums))
    return torch.from_numpy(
        gpu.rooted(np.array([sums.sum(dtype=F)]))
    ), norms if per_tensor else torch.zeros(0)


def _multi_tensor_sgd(chunk: int, flag: Tensor, lists: Lists, *settings: Any) -> None:
    scalars = gpu.sgd_scalars(*settings)
    if not _begin("multi_tensor_sgd", flag, lists):
        return
    kind = (lists[0][0].dtype, lists[1][0].dtype, len(lists))
    half, full = torch.float16, torch.float32
    if kind not in ((half, half, 3), (full, full, 3), (half, full, 4), (full, full, 4)):
        raise RuntimeError("Unsupported combination of weight and gradient types.")
    if not int(flag):
        gpu.walk(chunk, lists[:3], _DEPTH[3], False, lambda _, g, p, m: gpu.sgd(g, p, m, *scalars))


def modules() -> dict[str, ModuleType]:
    extension = ModuleType("transformer_engine_torch")
    for function in (
        _multi_tensor_adam,
        _multi_tensor_adam_param_remainder,
        _multi_tensor_scale,
        _multi_tensor_l2norm,
        _multi_tensor_sgd,
    ):
        setattr(extension, function.__name__.lstrip("_"), function)
    package, pytorch = (ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch"))
    package.__path__ = []
    package.pytorch = pytorch  # type: ignore[attr-defined]
    return {
        "transformer_engine": package,
        "transformer_engine.pytorch": pytorch,
        "transformer_engine_torch": extension,
    }
