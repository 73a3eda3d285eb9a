"""The old name of :mod:`mp_optim.quantized`, for one release."""

import warnings

from mp_optim.quantized.weights import Dequantize, quantize_weights

__all__ = ["Dequantize", "quantize_weights"]

warnings.warn(
    "mp_optim.float8 is called mp_optim.quantized", DeprecationWarning, stacklevel=2
)
