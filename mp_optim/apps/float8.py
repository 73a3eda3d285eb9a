"""Replacement of a model's matrices by float8 parameters that this package's optimizers step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mp_optim.core.quantized import FLOAT8_DTYPES, dequantized, quantize_

Select = Callable[[nn.Module, str, nn.Parameter], bool]


class _Values(torch.autograd.Function):
    """The values of a float8 parameter, with an identity gradient."""

    @staticmethod
    def forward(ctx: Any, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantized(codes).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Dequantize(nn.Module):
    """The parametrization of a float8 parameter: codes times scale in FP32, rounded to ``dtype``.

    Args:
        scale: FP32 tensor, in one of the shapes of :func:`mp_optim.core.quantized.scaled_codes`.
        dtype: dtype of the module's computation.
    """

    scale: Tensor

    def __init__(self, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.dtype = dtype

    def bind(self, codes: Any) -> None:
        """Give the float8 parameter ``codes`` this module's scale as ``fp8_scale``, and set the
        dtype of its gradients."""
        codes.fp8_scale = self.scale
        if codes.is_leaf and codes.grad is None and codes.grad_dtype != self.dtype:
            codes.grad_dtype = self.dtype

    def forward(self, codes: Tensor) -> Tensor:
        # Bind at every call, because moving or copying the module replaces the scale.
        self.bind(codes)
        return cast(Tensor, _Values.apply(codes, self.dtype))  # type: ignore[no-untyped-call]


def quantize_weights(
    model: nn.Module,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    rowwise: bool = True,
    select: Select | None = None,
) -> list[str]:
    """Replace parameters of a model, in place, by float8 parameters that this package's optimizers
    can step.

    The module dequantizes these parameters to their former dtype at every read, or once within
    ``torch.nn.utils.parametrize.cached()``. So any model runs, at the same speed or slower. The
    weights take half the memory, and training uses the values that a float8 kernel would use.
    torch's optimizers cannot step such parameters.

    Args:
        model: the module; changed in place.
        dtype: one of torch's float8 dtypes.
        rowwise: True for one scale per row of a matrix, or of each matrix of a stack. False for one
            scale per tensor.
        select: ``(module, name, param) -> bool``: True for parameters to replace. None for
            trainable parameters with at least two dimensions, except embeddings.

    Returns:
        Names of the float8 parameters, ``<module>.parametrizations.<name>.original``.

    Raises:
        ValueError: ``dtype`` is not a float8 dtype, or no parameter is selected.
        TypeError: a parameter is tied to another module; the message has both names.
        RuntimeError: this torch does not support gradients of another dtype than the parameter's.
    """
    if dtype not in FLOAT8_DTYPES:
        known = ", ".join(map(str, FLOAT8_DTYPES))
        raise ValueError(f"dtype={dtype}: this is not a float8 dtype; pass one of {known}")
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise RuntimeError(
            f"torch {torch.__version__}: gradients of float8 parameters would be float8, because "
            "Tensor.grad_dtype is missing; install a newer torch"
        )
    wanted = select or _is_matrix
    every = [
        (path, module, name, param)
        for path, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False)
    ]
    chosen = [entry for entry in every if wanted(*entry[1:])]
    if not chosen:
        raise ValueError(
            f"select: no parameter of the {type(model).__name__} is selected for {dtype}; select "
            "at least one"
        )
    chosen_ids = {id(param) for *_, param in chosen}
    owners: dict[int, str] = {}
    for path, _, name, param in every:
        other = owners.setdefault(id(param), f"{path}.{name}")
        if other != f"{path}.{name}" and id(param) in chosen_ids:
            raise TypeError(
                f"select: {path}.{name} is tied to {other}, and a tied parameter cannot be "
                "quantized; leave the parameter out"
            )
    return [_quantize(*entry, dtype, rowwise) for entry in chosen]


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
    path: str, module: nn.Module, name: str, param: nn.Parameter, dtype: torch.dtype, rowwise: bool
) -> str:
    codes: Any = nn.Parameter(
        torch.empty(param.shape, dtype=dtype, device=param.device),
        requires_grad=param.requires_grad,
    )
    for attribute, value in vars(param).items():
        setattr(codes, attribute, value)
    shape = (*param.shape[:-1], 1) if rowwise else ()
    values = Dequantize(torch.ones(shape, dtype=torch.float32, device=param.device), param.dtype)
    values.bind(codes)
    quantize_(codes, param.detach().float())
    parametrize.register_parametrization(module, name, values, unsafe=True)
    cast(Any, module).parametrizations[name].original = codes
    return f"{path}.parametrizations.{name}.original".lstrip(".")
