"""Loss of a causal language model that computes the logits of some tokens at a time, 512 by
default.

The output layer computes the logits in forward, and again in backward, so that they need not be
stored.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS = 512
"""Number of tokens whose logits are in memory at a time."""
IGNORED = -100
"""The label that transformers leaves out of the loss."""
_HEAD_THEN_LOSS = re.compile(
    r"logits = self\.lm_head\([^\n]*\)\s+loss = None\s+if labels is not None:\s+"
    r"loss = self\.loss_function\("
)


def can_chunk(model: Any) -> bool:
    """True if the model computes its loss directly from the output layer's product.

    Models that scale or cap their logits (Gemma, Granite, Cohere) are not supported.
    """
    forward = getattr(type(model), "forward", None)
    try:
        return _HEAD_THEN_LOSS.search(inspect.getsource(forward)) is not None  # type: ignore[arg-type]
    except (OSError, TypeError):
        return False


def chunk_loss(model: Any, rows: int = ROWS) -> Callable[[], None]:
    """Replace a model's loss, in training mode, by a loss that computes logits of ``rows`` tokens
    at a time.

    The loss is ``transformers``' ``ForCausalLMLoss``. Evaluation and generation do not change.
    Backward multiplies by the head once more. Liger's kernel avoids this product and is faster on a
    GPU.

    Args:
        model: a causal language model of ``transformers``, before adapters are added to it.
        rows: number of tokens whose logits exist at a time.

    Returns:
        A function that restores the model's own loss.

    Raises:
        ValueError: the model changes its logits before the loss.
    """
    if not can_chunk(model):
        raise ValueError(
            f"model={type(model).__name__}: the model changes its logits before the loss, so the "
            "loss cannot be computed in chunks; leave out the call of chunk_loss"
        )
    head = model.get_output_embeddings()
    own_product, own_loss = head.forward, model.loss_function

    def product(hidden: Tensor) -> Tensor:
        return hidden if head.training else own_product(hidden)

    def piece(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = own_product(hidden).float()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def loss(
        logits: Tensor,
        labels: Tensor,
        *args: Any,
        num_items_in_batch: Any = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not head.training:
            return own_loss(  # type: ignore[no-any-return]
                logits,
                labels,
                *args,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
                **kwargs,
            )
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        targets = shift_labels.flatten().to(logits.device)
        hidden = logits.flatten(0, -2)
        pieces = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        losses = [checkpoint(piece, *each, use_reentrant=False) for each in pieces]
        count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return torch.stack(losses).sum() / count

    def restore() -> None:
        del head.forward
        model.loss_function = own_loss

    head.forward, model.loss_function = product, loss
    return restore
