"""Model parameters in 8 bits: what they stand for, how they take the values of a main param, and a
model whose matrices are kept so.

Two kinds: torch's float8 dtypes with the scale as an attribute ``fp8_scale``, and tensor subclasses
that bring their own ``quantize_`` and ``dequantize``, as Transformer Engine's do. Either way the
optimizer steps an FP32 main param.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mp_optim.host.host_memory import same_values
from mp_optim.host.torch_types import is_dtensor

FLOAT8_DTYPES = tuple(
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
)
_SMALLEST_SCALE = 2.0**-126


def is_quantized(param: Tensor) -> bool:
    """Whether a parameter's values are codes that need a scale to be read."""
    return param.dtype in FLOAT8_DTYPES or _brings_its_own(param)


def _brings_its_own(param: Tensor) -> bool:
    return hasattr(type(param), "quantize_")


def check_quantized(name: str, param: Tensor) -> None:
    """Raise if a quantised parameter cannot be trained.

    Raises:
        TypeError: it is a DTensor. ValueError: its ``fp8_scale`` is missing or does not fit, saying
            what would.
    """
    if is_dtensor(param):
        if param.dtype in FLOAT8_DTYPES or _brings_its_own(param.to_local()):
            raise TypeError(
                f"{name} is a DTensor of {type(param.to_local()).__name__} {param.dtype}: the "
                "scale of a "
                "parameter that is split over ranks is not kept in agreement; shard it in 16 bits"
            )
        return
    if param.dtype not in FLOAT8_DTYPES:
        return
    scale = getattr(param, "fp8_scale", None)
    if not isinstance(scale, Tensor):
        raise ValueError(
            f"{name} is {param.dtype} and has no scale: set param.fp8_scale to an FP32 tensor, so "
            "that param.float() * fp8_scale are its values"
        )
    if scale.dtype != torch.float32 or scale.device != param.device:
        raise ValueError(
            f"{name}.fp8_scale is {scale.dtype} on {scale.device}: it must be float32 on "
            f"{param.device}"
        )
    fits = scale.ndim in (0, param.ndim) and all(
        0 < part <= size or part == size
        for part, size in zip(scale.shape, param.shape, strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name}.fp8_scale has shape {tuple(scale.shape)}: it must be () for one scale, or of "
            f"{param.ndim} dimensions, each at most the parameter's {tuple(param.shape)}: the "
            "number of blocks along it"
        )


def dequantized(param: Any) -> Tensor:
    """The values of a quantised parameter: FP32, its shape and device, memory of its own.

    A parameter that still has the values it was quantised from (Transformer Engine's
    ``get_high_precision_init_val``) gives those.
    """
    with torch.no_grad():
        if _brings_its_own(param):
            initial = getattr(param, "get_high_precision_init_val", lambda: None)()
            source = param.dequantize(dtype=torch.float32) if initial is None else initial
            return torch.empty(param.shape, dtype=torch.float32, device=param.device).copy_(source)
        codes: Tensor = param.detach().float()
        scale = getattr(param, "fp8_scale", None)
        return codes if scale is None else codes.mul_(_spread(scale, codes.shape))


def forget_initial_values(param: Any) -> None:
    """Let go of the values a parameter was quantised from; they are in a main param now."""
    if getattr(param, "get_high_precision_init_val", lambda: None)() is not None:
        param.clear_high_precision_init_val()


def quantize_(param: Any, main: Tensor) -> None:
    """Give a quantised parameter the values of its FP32 main param, which may be on the host.

    A float8 parameter's scale is made from the present values (:func:`scaled_codes`); a subclass
    does as its own recipe says.
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
    """Return everything that a quantized parameter's values are made of: uint8, 1-D."""
    with torch.no_grad():
        if _brings_its_own(param):
            values: Tensor = param.dequantize(dtype=torch.float32)
            return values.view(-1).view(torch.uint8)
        parts = (param.detach(), param.fp8_scale.detach())
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def holds(param: Any, main: Tensor) -> bool:
    """Whether a quantised parameter is what its main param becomes when it is quantised."""
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
    """Codes of a float8 dtype with scales of the given shape: each block's largest magnitude
    becomes the largest code.

    ``scale = max |values| / max(dtype)`` over the block, at least 2^-126, and 1 for a block of
    zeros; ``codes = round(values / scale)``, to the nearest, ties to even. FP32 throughout, so the
    same bits on every device.

    Args:
        values: FP32.
        scale_shape: () for one block, or how many blocks there are along each dimension; all but
            the last of a dimension are equally large.

    Returns:
        The scales, FP32, and the codes, in the shape of the values.
    """
    top = torch.finfo(dtype).max
    largest = _largest(values.abs(), scale_shape)
    # NOTE: by a tensor. CUDA divides by a number as it multiplies with the reciprocal, which is
    # another bit for half of all values.
    quotient = largest / torch.full_like(largest, top)
    scale = torch.where(largest == 0.0, 1.0, quotient.clamp_(min=_SMALLEST_SCALE))
    return scale, (values / _spread(scale, values.shape)).clamp_(-top, top).to(dtype)


def _largest(magnitudes: Tensor, blocks: Sequence[int]) -> Tensor:
    """The maximum of each block."""
    if not len(blocks) or magnitudes.numel() == 0:
        return (
            magnitudes.amax()
            if magnitudes.numel() and not len(blocks)
            else magnitudes.new_zeros(tuple(blocks))
        )
    for dim, count in enumerate(blocks):
        size = magnitudes.shape[dim]
        width = -(-size // count)
        if count * width != size:  # the last block is filled up; magnitudes are not below 0
            filled = magnitudes.new_zeros(
                (*magnitudes.shape[:dim], count * width, *magnitudes.shape[dim + 1 :])
            )
            filled.narrow(dim, 0, size).copy_(magnitudes)
            magnitudes = filled
        split = (*magnitudes.shape[:dim], count, width, *magnitudes.shape[dim + 1 :])
        magnitudes = magnitudes.reshape(split).amax(dim + 1)
    return magnitudes


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Scales of blocks, one for each element."""
    if scale.ndim == 0:
        return scale
    for dim, size in enumerate(shape):
        count = scale.shape[dim]
        if count not in (1, size):
            scale = scale.repeat_interleave(-(-size // count), dim).narrow(dim, 0, size)
    return scale


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
        scale: FP32, in one of the shapes of :func:`mp_optim.core.quantized.scaled_codes`.
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
                raise TypeError(f"{path}.{name} is tied to {other}: leave it out by select=")
    return [
        _quantize(path, module, name, param, dtype, rowwise) for path, module, name, param in chosen
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
