"""Keep a model's matrices as torch float8 codes with scales, and compute with what they stand
for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mp_optim.quantized.tensors import FLOAT8_DTYPES, dequantized, quantize_

Select = Callable[[nn.Module, str, nn.Parameter], bool]


class _Values(torch.autograd.Function):
    """The values of a float8 parameter; their gradient goes to it as it is."""

    @staticmethod
    def forward(ctx: Any, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantized(codes).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Dequantize(nn.Module):
    """The parametrization of a float8 parameter: its codes times its scale in FP32, rounded to
    ``dtype``.

    Args:
        scale: FP32, in one of the shapes of :func:`mp_optim.quantized.scaled_codes`.
    """

    scale: Tensor

    def __init__(self, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.dtype = dtype

    def bind(self, codes: Any) -> None:
        """Let a float8 parameter know its scale, and that its gradients are in 16 bits."""
        codes.fp8_scale = self.scale
        if codes.is_leaf and codes.grad is None and codes.grad_dtype != self.dtype:
            codes.grad_dtype = self.dtype

    def forward(self, codes: Tensor) -> Tensor:
        self.bind(codes)  # the module may have been moved or copied
        return cast(Tensor, _Values.apply(codes, self.dtype))  # type: ignore[no-untyped-call]


def quantize_weights(
    model: nn.Module,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    rowwise: bool = True,
    select: Select | None = None,
) -> list[str]:
    """Replace parameters of a model, in place, by float8 ones that torch optimizers cannot step and
    these can.

    The module computes with their values in the dtype it had, so any model works, and no faster:
    this halves the memory of the weights and trains what a float8 kernel will be given. Every read
    makes the values anew; within ``torch.nn.utils.parametrize.cached()`` once.

    Args:
        dtype: one of torch's float8 dtypes.
        rowwise: a scale for each row of a matrix (of each matrix of a stack); else one for the
            whole tensor.
        select: ``(module, name, param) -> bool``, which parameters; by default trainable ones of at
            least two dimensions, but for embeddings.

    Returns:
        Names of the parameters that are float8 now, ``<module>.parametrizations.<name>.original``.

    Raises:
        ValueError: ``dtype`` is no float8 dtype, or nothing is selected.
        TypeError: a parameter is tied to another module, naming both.
        RuntimeError: this torch cannot give a parameter gradients of another dtype.
    """
    if dtype not in FLOAT8_DTYPES:
        raise ValueError(f"dtype={dtype}: must be one of {list(FLOAT8_DTYPES)}")
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise RuntimeError(
            f"torch {torch.__version__} has no Tensor.grad_dtype, so gradients of float8 "
            "parameters would be float8 too; install a newer torch"
        )
    wanted = select or _is_matrix
    chosen = [
        (path, module, name, param)
        for path, module in list(model.named_modules())
        for name, param in list(module.named_parameters(recurse=False))
        if wanted(module, name, param)
    ]
    if not chosen:
        raise ValueError(
            f"nothing to keep as {dtype} in a {type(model).__name__}: no parameter is selected"
        )
    owners: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            other = owners.setdefault(id(param), f"{path}.{name}")
            if other != f"{path}.{name}" and any(
                param is other_param for *_, other_param in chosen
            ):
                raise TypeError(
                    f"{path}.{name} is tied to {other}: leave it out by select="
                )
    return [
        _quantize(path, module, name, param, dtype, rowwise)
        for path, module, name, param in chosen
    ]


def _is_matrix(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    is_embedding = isinstance(module, nn.Embedding) or getattr(
        param, "is_embedding_or_output_parameter", False
    )
    return (
        param.ndim >= 2
        and param.requires_grad
        and param.dtype not in FLOAT8_DTYPES
        and not is_embedding
    )


def _quantize(
    path: str,
    module: nn.Module,
    name: str,
    param: nn.Parameter,
    dtype: torch.dtype,
    rowwise: bool,
) -> str:
    codes: Any = nn.Parameter(
        torch.empty(param.shape, dtype=dtype, device=param.device),
        requires_grad=param.requires_grad,
    )
    for attribute, value in vars(param).items():
        setattr(codes, attribute, value)
    shape = (*param.shape[:-1], 1) if rowwise else ()
    values = Dequantize(
        torch.ones(shape, dtype=torch.float32, device=param.device), param.dtype
    )
    values.bind(codes)
    quantize_(codes, param.detach().float())
    parametrize.register_parametrization(module, name, values, unsafe=True)
    cast(Any, module).parametrizations[name].original = codes
    return f"{path}.parametrizations.{name}.original".lstrip(".")
