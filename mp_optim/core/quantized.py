"""8-bit model parameters: reads their values, and quantizes main params into them.

Two kinds are supported: torch's float8 dtypes with a scale in the attribute ``fp8_scale``, and
tensor subclasses with methods ``quantize_`` and ``dequantize``, such as Transformer Engine's. The
optimizer steps an FP32 main param for each such parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.host.host_memory import same_values
from mp_optim.host.torch_types import is_dtensor

FLOAT8_DTYPES = tuple(
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
)
_SMALLEST_SCALE = 2.0**-126


def is_quantized(param: Tensor) -> bool:
    """True if a parameter stores codes, which have values only together with a scale."""
    return param.dtype in FLOAT8_DTYPES or _brings_its_own(param)


def _brings_its_own(param: Tensor) -> bool:
    return hasattr(type(param), "quantize_")


def check_quantized(name: str, param: Tensor) -> None:
    """Raise if a quantized parameter cannot be trained.

    Args:
        name: FQN of the parameter, for messages.
        param: the parameter; a parameter that is not quantized passes.

    Raises:
        TypeError: the parameter is quantized and a DTensor.
        ValueError: ``fp8_scale`` is missing or does not fit the parameter.
    """
    if is_dtensor(param):
        if param.dtype in FLOAT8_DTYPES or _brings_its_own(param.to_local()):
            raise TypeError(
                f"{name} is a DTensor of {type(param.to_local()).__name__} {param.dtype}, which "
                "is not supported, because each rank would compute its own scales; shard the "
                "parameter in 16 bits"
            )
        return
    if param.dtype not in FLOAT8_DTYPES:
        return
    scale = getattr(param, "fp8_scale", None)
    if not isinstance(scale, Tensor):
        raise ValueError(
            f"{name} is {param.dtype} and has no scale; set param.fp8_scale to an FP32 tensor such "
            "that param.float() * fp8_scale are the values"
        )
    if scale.dtype != torch.float32 or scale.device != param.device:
        raise ValueError(
            f"{name}.fp8_scale is {scale.dtype} on {scale.device}, but must be float32 on "
            f"{param.device}; set param.fp8_scale = scale.to(param.device, torch.float32)"
        )
    fits = scale.ndim in (0, param.ndim) and all(
        0 < part <= size or part == size
        for part, size in zip(scale.shape, param.shape, strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name}.fp8_scale has shape {tuple(scale.shape)}, and the parameter "
            f"{tuple(param.shape)}; give the scale shape () for one scale of the whole parameter, "
            f"or {param.ndim} dimensions for one scale per block. Each dimension is the number of "
            "blocks along it, from 1 to the parameter's size"
        )


def dequantized(param: Any) -> Tensor:
    """Return the values of a quantized parameter in new FP32 memory of the same shape and device.

    If Transformer Engine still has the values from which the parameter was quantized
    (``get_high_precision_init_val``), return those values.
    """
    with torch.no_grad():
        if _brings_its_own(param):
            initial = getattr(param, "get_high_precision_init_val", lambda: None)()
            source = param.dequantize(dtype=torch.float32) if initial is None else initial
            return torch.empty(param.shape, dtype=torch.float32, device=param.device).copy_(source)
        codes: Tensor = param.detach().float()
        scale = getattr(param, "fp8_scale", None)
        return codes if scale is None else codes.mul_(_spread(scale, codes.shape))


def quantize_(param: Any, main: Tensor) -> None:
    """Quantize an FP32 main param into its parameter, in place.

    A float8 parameter gets new scales, computed from the values (:func:`scaled_codes`). A tensor
    subclass uses its own recipe.

    Args:
        param: the quantized parameter.
        main: the FP32 main param, on any device.
    """
    with torch.no_grad():
        values = main.to(param.device)
        if _brings_its_own(param):
            param.quantize_(values)
            return
        scale, codes = scaled_codes(values, param.fp8_scale.shape, param.dtype)
        param.fp8_scale.copy_(scale)
        param.detach().copy_(codes)


def bits_of(param: Any) -> Tensor:
    """Return all bits that determine the values of a quantized parameter: uint8, 1-D."""
    with torch.no_grad():
        if _brings_its_own(param):
            values: Tensor = param.dequantize(dtype=torch.float32)
            return values.view(-1).view(torch.uint8)
        parts = (param.detach(), param.fp8_scale.detach())
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def holds(param: Any, main: Tensor) -> bool:
    """True if quantizing a main param gives exactly the bits of its parameter.

    Args:
        param: the quantized parameter.
        main: the FP32 main param, on any device.
    """
    with torch.no_grad():
        values = main.to(param.device)
        if _brings_its_own(param):
            other: Any = torch.empty_like(param.detach())
            other.quantize_(values)
            return same_values(
                other.dequantize(dtype=torch.float32), param.dequantize(dtype=torch.float32)
            )
        scale, codes = scaled_codes(values, param.fp8_scale.shape, param.dtype)
        return bool(
            same_values(scale, param.fp8_scale)
            and torch.equal(codes.view(torch.uint8), param.detach().view(torch.uint8))
        )


def scaled_codes(
    values: Tensor, scale_shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return scales of the given shape and codes of a float8 dtype.

    ``scale = max |values| / max(dtype)`` over a block, at least 2^-126, and 1 for a block of zeros.
    ``codes = round(values / scale)``, to nearest, ties to even. All operations are FP32, so every
    device computes the same bits.

    Args:
        values: FP32 tensor.
        scale_shape: () for one block, or the number of blocks along each dimension. Blocks have
            equal sizes, except the last along each dimension.
        dtype: a float8 dtype.

    Returns:
        The FP32 scales, and the codes in the shape of ``values``.
    """
    top = torch.finfo(dtype).max
    largest = _largest(values.abs(), scale_shape)
    # Divide by a tensor. For a division by a number, CUDA multiplies by the reciprocal, which gives
    # another result for half of all values.
    quotient = largest / torch.full_like(largest, top)
    scale = torch.where(largest == 0.0, 1.0, quotient.clamp_(min=_SMALLEST_SCALE))
    return scale, (values / _spread(scale, values.shape)).clamp_(-top, top).to(dtype)


def _largest(magnitudes: Tensor, blocks: Sequence[int]) -> Tensor:
    """Return the maximum of each block.

    Args:
        magnitudes: absolute values.
        blocks: number of blocks along each dimension; empty for one block.
    """
    if not magnitudes.numel():
        return magnitudes.new_zeros(tuple(blocks))
    if not len(blocks):
        return magnitudes.amax()
    for dim, count in enumerate(blocks):
        size = magnitudes.shape[dim]
        width = -(-size // count)
        # Pad the last block with 0, the least magnitude, which does not change the maximum.
        padding = [0, 0] * (magnitudes.ndim - 1 - dim) + [0, count * width - size]
        magnitudes = torch.nn.functional.pad(magnitudes, padding)
        split = (*magnitudes.shape[:dim], count, width, *magnitudes.shape[dim + 1 :])
        magnitudes = magnitudes.reshape(split).amax(dim + 1)
    return magnitudes


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return the scale of each element, from the scale of each block.

    Args:
        scale: FP32 scales of blocks.
        shape: shape of the values.
    """
    if scale.ndim == 0:
        return scale
    for dim, size in enumerate(shape):
        count = scale.shape[dim]
        if count not in (1, size):
            scale = scale.repeat_interleave(-(-size // count), dim).narrow(dim, 0, size)
    return scale
