"""Table of the storage formats of optimizer state.

Choices of the config, dtypes, sizes, codecs, kernels, and names in messages and plans come from
this table. The encoding is in ``kernels/codecs.py``, ``csrc/formats.inl`` and
``triton/kernels/formats.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 256
"""Number of row-major elements of a moment that share one scale."""
PACKED = 64
"""Number of 4-bit codes in one packed run of 32 bytes. Byte ``i`` has code ``i`` in its lower half
and code ``i + 32`` in its upper half."""
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]  # torch's stubs lack it


@dataclass(frozen=True)
class StateForm:
    """Storage format of one kind of state.

    Attributes:
        words: name in messages.
        dtype: dtype of the tensor; None if no tensor is stored.
        native: number of the format in ``csrc/api.h``.
        asked: value of the config's field, if it differs from ``dtype``.
        in_blocks: True if each :data:`BLOCK` elements have an FP32 scale.
        packed: True if a byte holds two codes; the tensor then has one dimension.
        is_rounded: True if ``stochastic_rounding`` applies to the format.
    """

    words: str
    dtype: Any
    native: int
    asked: Any = None
    in_blocks: bool = False
    packed: bool = False
    is_rounded: bool = False

    @property
    def name(self) -> Any:
        """The value of the config's field that selects this format."""
        return self.dtype if self.asked is None else self.asked


def packed_bytes(numel: int) -> int:
    """Return the bytes of ``numel`` 4-bit codes, rounded up to runs of :data:`PACKED` codes."""
    return -(-numel // PACKED) * (PACKED // 2)


def blocks_of(numel: int) -> int:
    """Return the number of scales of a tensor of ``numel`` elements."""
    return -(-numel // BLOCK)


FP32 = StateForm("FP32", torch.float32, 1)
BF16 = StateForm("bf16", torch.bfloat16, 2, is_rounded=True)
FP16 = StateForm("fp16", torch.float16, 3, in_blocks=True)

FIRST_FORMS = (
    FP32,
    BF16,
    FP16,
    StateForm("8-bit", torch.int8, 4, torch.uint8, in_blocks=True, is_rounded=True),
    StateForm("4-bit", torch.uint8, 7, UINT4, in_blocks=True, packed=True, is_rounded=True),
)
"""Formats of a first moment, a momentum or another average of gradients."""
SECOND_FORMS = (
    FP32,
    BF16,
    FP16,
    StateForm("8-bit", torch.uint8, 5, in_blocks=True, is_rounded=True),
)
"""Formats of a second moment. Formats with blocks store the square root of the moment."""
NO_REMAINDER = StateForm("no main params", None, 8, 0, is_rounded=True)
REMAINDER_FORMS = (
    StateForm("remainders", torch.int16, 6, 16),
    StateForm("8-bit remainders", torch.int8, 4, 8, is_rounded=True),
    NO_REMAINDER,
)
"""Formats of a remainder: the bits of a main param that its bfloat16 parameter lacks."""
AVERAGE_FORMS = (FP32, BF16)
"""Formats of the moving averages of main params."""

CODED = {form.name for form in FIRST_FORMS if form.in_blocks and form.dtype.itemsize == 1}
"""Config values of the 8-bit and 4-bit formats of moments."""
REMAINDERS: dict[Any, StateForm] = {form.name: form for form in REMAINDER_FORMS}
"""Formats of remainders by config value."""
REMAINDER_CHOICES = "must be 16 or 8, or 0 for none"
"""Allowed values of ``param_remainder_bits``, as words of an error."""
MOMENT_WORDS: dict[Any, str] = {form.name: form.words for form in (*SECOND_FORMS, *FIRST_FORMS)}
"""Names of the formats of moments in messages, by config value."""
