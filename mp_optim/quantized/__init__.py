"""Model parameters in 8 bits: what they stand for, and a model whose matrices are kept so."""

from mp_optim.quantized.tensors import (
    FLOAT8_DTYPES,
    check_quantized,
    dequantized,
    forget_initial_values,
    holds,
    is_quantized,
    quantize_,
    scaled_codes,
)
from mp_optim.quantized.weights import Dequantize, quantize_weights

__all__ = [
    "FLOAT8_DTYPES",
    "Dequantize",
    "check_quantized",
    "dequantized",
    "forget_initial_values",
    "holds",
    "is_quantized",
    "quantize_",
    "quantize_weights",
    "scaled_codes",
]
