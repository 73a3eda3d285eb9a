"""Divisions with CUDA's bits: CUDA multiplies by the reciprocal if the divisor is a number."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DIVISIONS = (
    torch.ops.aten.div.Tensor,
    torch.ops.aten.div_.Tensor,
    torch.ops.aten.div.Scalar,
    torch.ops.aten.div_.Scalar,
    torch.ops.aten._foreach_div.Scalar,
    torch.ops.aten._foreach_div_.Scalar,
)


class DividesAsCuda(TorchDispatchMode):
    """Replaces each division of a floating-point tensor by a number with CUDA's product. The
    reciprocal is FP32, or FP64 for FP64 tensors.

    Attributes:
        numbers: the divisors seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DIVISIONS and not isinstance(args[1], Tensor):
            self.numbers.append(float(args[1]))
            return self._multiplied(func, args)
        return func(*args, **(kwargs or {}))

    def _multiplied(self, func: Any, args: Any) -> Any:
        tensors, number = args[0], args[1]
        several = isinstance(tensors, (list, tuple))
        products = [_product(each, number) for each in (tensors if several else [tensors])]
        if func.__name__.partition(".")[0].endswith("_"):
            for each, product in zip(tensors if several else [tensors], products, strict=True):
                each.copy_(product)
            return tensors
        return products if several else products[0]


def _product(tensor: Tensor, number: float) -> Tensor:
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    reciprocal = 1.0 / torch.tensor(number, dtype=dtype, device=tensor.device)
    return (tensor.to(dtype) * reciprocal).to(tensor.dtype)
