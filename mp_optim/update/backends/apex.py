"""NVIDIA apex: the kernels of its extension ``amp_C``, without its optimizer classes.

The classes key state by tensor, keep master weights outside the state dict and step groups by
parallel lists; the kernels do none of that. Arithmetic as apex has it: docs/numerics.md, "apex and
Transformer Engine".
"""

from __future__ import annotations

import importlib

import torch

from mp_optim.update.backends.multi_tensor import (
    MOST_ELEMENTS,
    Kind,
    MultiTensorBackend,
)
from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.chunking import (
    first_moments,
    mark_written,
    piece_elements,
    publish,
)
from mp_optim.update.kernel_args import AdamScalars, LambScalars, TensorLists
from mp_optim.update.stored_values import take_averages


def load() -> ApexBackend:
    """Import the extension.

    Raises:
        Exception: whatever a missing or broken installation raises.
    """
    return ApexBackend(importlib.import_module("amp_C"))


class ApexBackend(MultiTensorBackend):
    """FP32 main params and moments. Gradients in 16 bits, or with a multiplier, go through FP32
    batch by batch, as the kernels take gradients and parameters of one dtype."""

    name = "apex"
    limits = (
        "float64 gradients, lion, and LAMB of parameters that are sharded or beyond 2^31 elements: "
        "reference"
    )

    def adam_launch(
        self, kind: Kind, batch: TensorLists, scalars: AdamScalars, multiplier: float
    ) -> None:
        plain = kind.grad == torch.float32 and multiplier == 1.0
        grads = batch.grad if plain else self.scaled(batch.grad, multiplier)
        given = scalars.given
        self.launch(
            "multi_tensor_adam",
            [grads, batch.main, first_moments(batch), batch.state["exp_avg_sq"]],
            [torch.float32] * 4,
            given.lr,
            scalars.beta1,
            scalars.beta2,
            scalars.eps,
            given.step,
            0 if scalars.l2 else 1,
            int(given.bias_correction),
            given.weight_decay,
        )
        publish(batch)

    def lamb(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> None:
        for kind, part in self.split(lists):
            small = [
                index
                for index, main in enumerate(part.main)
                if main.numel() <= MOST_ELEMENTS
            ]
            large = [
                index
                for index, main in enumerate(part.main)
                if main.numel() > MOST_ELEMENTS
            ]
            for indices in _together(part, small) if kind else []:
                self._lamb_launch(part.take(indices), scalars, multiplier)
            mark_written(part)
            if rest := (large if kind else [*small, *large]):
                ReferenceBackend.lamb(self, part.take(rest), scalars, multiplier)

    def _lamb_launch(
        self, batch: TensorLists, scalars: LambScalars, multiplier: float
    ) -> None:
        """The kernel writes the direction over the gradient, so it gets a copy. A clip limit of 0
        would make all gradients 0; a norm of 0 turns the clip off."""
        given, device = scalars.given, batch.main[0].device
        lists = [
            self.scaled(batch.grad, multiplier),
            batch.main,
            batch.state["exp_avg"],
            batch.state["exp_avg_sq"],
        ]
        self.launch(
            "multi_tensor_lamb",
            lists,
            [torch.float32] * 4,
            given.lr,
            scalars.beta1,
            scalars.beta2,
            scalars.eps,
            given.step,
            int(given.bias_correction),
            given.weight_decay,
            int(scalars.grad_weight != 1.0),
            0 if scalars.l2 else 1,
            torch.zeros(1, dtype=torch.float32, device=device),
            1.0,
            scalars.adapts,
        )
        publish(batch)
        take_averages(batch)


def _together(lists: TensorLists, indices: list[int]) -> list[list[int]]:
    """Runs of whole tensors of about one batch's size."""
    runs: list[list[int]] = []
    room = 0
    for index in indices:
        size = lists.main[index].numel()
        if size > room:
            runs.append([])
            room = piece_elements(lists.main[index].device)
        runs[-1].append(index)
        room -= size
    return runs
