"""Transformer Engine: the kernels of its extension ``transformer_engine_torch``, without its
optimizer classes.

It checks dtypes but neither devices nor strides: ``multi_tensor`` does. Its Adam reads 16-bit
gradients and writes the 16-bit parameter in the same pass. Arithmetic: docs/numerics.md, "apex and
Transformer Engine".
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from mp_optim.slots.state_keys import AVERAGE, REMAINDER
from mp_optim.update.backends.multi_tensor import READABLE, Kind, MultiTensorBackend
from mp_optim.update.chunking import first_moments, publish
from mp_optim.update.kernel_args import AdamScalars, TensorLists

_QUIET_NAN = 0x7FC0
_MOMENTS = ({torch.float32}, {torch.bfloat16})


def load() -> TransformerEngineBackend:
    """Import the extension; its core library is loaded by the package.

    Raises:
        Exception: whatever a missing or broken installation raises (not only ImportError).
    """
    importlib.import_module("transformer_engine.pytorch")
    return TransformerEngineBackend(importlib.import_module("transformer_engine_torch"))


class TransformerEngineBackend(MultiTensorBackend):
    """Moments both FP32 or both bfloat16; main params FP32, or bfloat16 with remainders of 16
    bits."""

    name = "transformer_engine"
    limits = "float64 gradients, lamb and lion: reference"

    def takes(self, lists: TensorLists, kind: Kind) -> bool:
        if super().takes(lists, kind):
            return True
        if (
            lists.noise is not None
            or "exp_avg_sq" not in lists.state
            or kind.grad not in READABLE
        ):
            return False
        keys = [key for key in lists.state if key != AVERAGE]
        state = dict(zip(keys, kind.state, strict=True))
        remainder = state.pop(REMAINDER, None)
        mains = (kind.main, remainder) in (
            (torch.float32, None),
            (torch.bfloat16, torch.int16),
        )
        return (
            mains
            and set(state.values()) in _MOMENTS
            and (kind.output is None or kind.output in READABLE)
        )

    def adam_launch(
        self, kind: Kind, batch: TensorLists, scalars: AdamScalars, multiplier: float
    ) -> None:
        grads = batch.grad if multiplier == 1.0 else self.scaled(batch.grad, multiplier)
        moments = [first_moments(batch), batch.state["exp_avg_sq"]]
        dtypes = [grads[0].dtype, kind.main, moments[0][0].dtype, moments[1][0].dtype]
        given = scalars.given
        arguments = (
            given.lr,
            scalars.beta1,
            scalars.beta2,
            scalars.eps,
            given.step,
            0 if scalars.l2 else 1,
            int(given.bias_correction),
            given.weight_decay,
        )
        outputs = [output for output in batch.output if output is not None]
        if REMAINDER in batch.state:
            rests = batch.state[REMAINDER]
            _clear_zeros(batch.main, rests)
            self.launch(
                "multi_tensor_adam_param_remainder",
                [grads, batch.main, *moments, rests],
                [*dtypes, torch.int16],
                *arguments,
            )
            _show_nans(batch.main, rests)
            publish(batch)
        elif outputs:
            self.launch(
                "multi_tensor_adam",
                [grads, outputs, *moments, batch.main],
                [dtypes[0], outputs[0].dtype, *dtypes[2:], torch.float32],
                *arguments,
            )
        else:
            self.launch(
                "multi_tensor_adam", [grads, batch.main, *moments], dtypes, *arguments
            )


def _bits_of(params: list[Tensor], rests: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Copies of all parameters, as the integers of their bits, and of all remainders, each as one
    flat tensor of a batch's size: what is done to it takes as many launches for any number of
    tensors."""
    return torch.cat([param.view(torch.int16) for param in params]), torch.cat(rests)


def _give_back(values: Tensor, tensors: list[Tensor]) -> None:
    sizes = [tensor.numel() for tensor in tensors]
    torch._foreach_copy_(tensors, values.split_with_sizes(sizes))


def _is_zero(bits: Tensor) -> Tensor:
    return (bits & 0x7FFF) == 0


def _clear_zeros(params: list[Tensor], rests: list[Tensor]) -> None:
    """A zero has no remainder here; the kernel would borrow from it and make a NaN."""
    high, low = _bits_of(params, rests)
    _give_back(low.masked_fill_(_is_zero(high), 0), rests)


def _show_nans(params: list[Tensor], rests: list[Tensor]) -> None:
    """CUDA's NaN, 0x7fffffff, rounds to a bfloat16 zero. Nothing else leaves a negative remainder
    beside a zero."""
    high, low = _bits_of(params, rests)
    hidden = _is_zero(high) & (low < 0)
    shown = high.masked_fill_(hidden, _QUIET_NAN).view(torch.bfloat16)
    _give_back(shown, params)
    _give_back(low.masked_fill_(hidden, 0), rests)
