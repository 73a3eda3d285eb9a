"""What tensors a backend is tried on: parameters, gradients, and state in every form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.process.host_memory import zeros
from mp_optim.slots.state_keys import AVERAGE, REMAINDER, SECOND, scale_key
from mp_optim.update.codecs import Noise, stored_dtype
from mp_optim.update.kernel_args import TensorLists, fp32
from mp_optim.update.state_format import moment_forms

_PERIOD = 1009
"""Values repeat after so many: a prime, so that no block, tile or chunk equals its neighbour."""


def _values(count: int, phase: float, device: torch.device) -> Tensor:
    """Numbers of several magnitudes, the same on every device: nothing here may touch a random
    generator."""
    at = torch.arange(min(count, _PERIOD), dtype=torch.float64, device="cpu") + phase
    values = (torch.sin(at * 1.7) + 0.1) * torch.exp2(-4 * torch.cos(at * 0.3) ** 2)
    return values.float().repeat(-(-count // _PERIOD))[:count].to(device)


def _shifted(values: Tensor, dtype: torch.dtype, shift: int) -> Tensor:
    """A copy that begins ``shift`` elements into its storage."""
    memory = torch.zeros(len(values) + shift, dtype=dtype, device=values.device)
    return memory[shift:].copy_(values)


@dataclass(frozen=True)
class Case:
    """What tensors a backend is tried on.

    Attributes:
        shift: how many elements into its storage each tensor begins.
    """

    rule: str
    grad: torch.dtype = torch.float32
    output: torch.dtype | None = None
    multiplier: float = 1.0
    shift: int = 0

    def lists(self, device: torch.device, sizes: Sequence[int]) -> TensorLists:
        """Fresh lists, the same at every call; their state is that of no step."""
        mains, grads, outputs = [], [], []
        for index, size in enumerate(sizes):
            main = _values(size, 5.0 + 0.1 * index, device)
            mains.append(_shifted(main, torch.float32, self.shift))
            grads.append(
                _shifted(_values(size, 0.7 + index, device), self.grad, self.shift)
            )
            outputs.append(
                None
                if self.output is None
                else _shifted(torch.zeros_like(main), self.output, self.shift)
            )
        state = {}
        for key in RULES[self.rule].moment_names:
            state[key] = [
                _shifted(main * 0.0, torch.float32, self.shift) for main in mains
            ]
        return TensorLists(mains, grads, state, outputs)


def in_few_bits(lists: TensorLists, first: torch.dtype) -> TensorLists:
    """The same with main params as bfloat16 beside 8-bit remainders, moments as codes, and averages
    in bfloat16, all with noise."""
    state: dict[str, Any] = {}
    for key, asked in (("exp_avg", first), (SECOND, torch.uint8)):
        dtype = stored_dtype(key, asked)
        forms = [moment_forms(key, main.shape, dtype) for main in lists.main]
        for name in (key, scale_key(key)):
            state[name] = [zeros(*each[name], lists.main[0].device) for each in forms]
    state[REMAINDER] = [torch.zeros_like(main, dtype=torch.int8) for main in lists.main]
    mains = [main.bfloat16() for main in lists.main]
    state[AVERAGE] = [main.flip(0).contiguous() for main in mains]
    noise = [Noise(0x9ABCDEF1, 77 + index) for index in range(len(mains))]
    weight = fp32(0.01)
    return TensorLists(
        mains, lists.grad, state, lists.output, noise, average_weight=weight
    )


def compacted(lists: TensorLists, bfloat16: bool, remainders: bool) -> TensorLists:
    """The same with moments in bfloat16, or main params as bfloat16 beside remainders."""
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    state = {
        key: [tensor.to(dtype) for tensor in tensors]
        for key, tensors in lists.state.items()
    }
    if not remainders:
        return TensorLists(lists.main, lists.grad, state, lists.output)
    mains = [main.bfloat16() for main in lists.main]
    state[REMAINDER] = [torch.zeros_like(main, dtype=torch.int16) for main in mains]
    return TensorLists(mains, lists.grad, state, lists.output)
