"""The forms in which state is stored, as one table. What a config may ask for, tensors and their
bytes, codecs, the tables of native and Triton kernels, names in messages and plans are read from
it. How values become codes is in ``kernels/codecs.py``, ``csrc/formats.inl`` and
``triton/kernels/formats.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 256
"""Row-major elements of a moment that share a scale."""
PACKED = 64
"""4-bit codes that are packed together: byte ``i`` of 32 has code ``i`` in its lower half and code
``i + 32`` in its upper one."""
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]  # torch's stubs lack it


@dataclass(frozen=True)
class StateForm:
    """How some state is stored.

    Attributes:
        words: for people.
        dtype: of its tensor; None where there is none.
        native: its number in ``csrc/api.h``.
        asked: what a config calls it, where that is not ``dtype``.
        in_blocks: there is an FP32 scale for each :data:`BLOCK` elements.
        packed: two codes a byte, in a tensor of one dimension whatever the parameter's shape.
        is_rounded: by random bits, with ``stochastic_rounding``.
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
        """What a config calls it."""
        return self.dtype if self.asked is None else self.asked


def packed_bytes(numel: int) -> int:
    """Bytes that ``numel`` 4-bit codes take: whole runs of 64 codes."""
    return -(-numel // PACKED) * (PACKED // 2)


def blocks_of(numel: int) -> int:
    """Scales of a tensor of ``numel`` elements."""
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
"""Of a first moment, a momentum or another average of gradients."""
SECOND_FORMS = (
    FP32,
    BF16,
    FP16,
    StateForm("8-bit", torch.uint8, 5, in_blocks=True, is_rounded=True),
)
"""Of a second moment. In blocks it is stored by its square root."""
NO_REMAINDER = StateForm("no main params", None, 8, 0, is_rounded=True)
REMAINDER_FORMS = (
    StateForm("remainders", torch.int16, 6, 16),
    StateForm("8-bit remainders", torch.int8, 4, 8, is_rounded=True),
    NO_REMAINDER,
)
"""Of what is missing of a main param beside the bfloat16 parameter."""
AVERAGE_FORMS = (FP32, BF16)
"""Of averages of main params."""

CODED = {form.name for form in FIRST_FORMS if form.in_blocks and form.dtype.itemsize == 1}
"""What a config calls the forms of moments in codes of 8 or 4 bits."""
REMAINDERS: dict[Any, StateForm] = {form.name: form for form in REMAINDER_FORMS}
"""Forms of remainders, by what a config calls them."""
REMAINDER_CHOICES = "must be 16 or 8, or 0 for none"
"""What a config may ask for, in words."""
KAHAN_IS_GONE = "Kahan's compensation stood still at small learning rates and was removed"
MOMENT_WORDS: dict[Any, str] = {form.name: form.words for form in (*SECOND_FORMS, *FIRST_FORMS)}
"""Names of the forms of moments, by what a config calls them."""
