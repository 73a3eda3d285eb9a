"""Muon's passes over elements in the self-test of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.update.backends.interface import Backend
from mp_optim.update.kernel_args import MuonScalars, TensorLists, fp32
from mp_optim.update.muon_passes import MOMENTUM

_GROUP = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True}
_MULTIPLIER, _FACTOR = fp32(0.37), fp32(0.011)


class MuonTensors(NamedTuple):
    """What both passes work on; each of them as :class:`TensorLists` lists them."""

    mains: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]
    rounded: list[Tensor]
    outputs: list[Tensor]

    @classmethod
    def of(cls, mains: Sequence[Tensor], grads: Sequence[Tensor]) -> MuonTensors:
        """Copies of FP32 main params, with gradients and momenta of their own."""
        return cls(
            [main.clone() for main in mains],
            [grad.bfloat16() for grad in grads],
            [0.3 * main for main in mains],
            [torch.zeros_like(main, dtype=torch.bfloat16) for main in mains],
            [torch.zeros_like(main, dtype=torch.bfloat16) for main in mains],
        )

    def step(self, backend: Backend) -> None:
        """Both passes, with what is to be orthogonalised as the direction."""
        scalars = MuonScalars.at(_GROUP)
        momenta = TensorLists([], self.grads, {MOMENTUM: self.momenta}, self.rounded)
        backend.muon_momentum(momenta, scalars, _MULTIPLIER)
        params = TensorLists(self.mains, self.rounded, {}, self.outputs)
        backend.muon_apply(params, scalars, [_FACTOR] * len(self.mains))
