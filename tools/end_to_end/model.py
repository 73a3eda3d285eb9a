"""A causal language model of Qwen3's shape in plain torch: no download, no other library.

Blocks are checkpointed, and the loss computes the logits of some tokens at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mp_optim.apps.fit.command import shipped

ROWS = 1024
"""Tokens whose logits exist at a time."""
_EXTRA = {"atom": (300, 32, 64, 1, 2, 1, 16, True), "tiny": (512, 256, 896, 2, 8, 4, 32, True)}
_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
)


class Shape:
    """Sizes of a model, with the names that ``transformers`` gives them.

    Args:
        name: a key of ``_EXTRA``, or the last part of a name that ``mp-optim fit`` knows.

    Raises:
        KeyError: the name is not known.
    """

    def __init__(self, name: str) -> None:
        known = {key.rpartition("/")[2]: value for key, value in shipped().items()}
        values = _EXTRA[name] if name in _EXTRA else [known[name][field] for field in _FIELDS]
        self.name = name
        self.vocab, self.hidden, self.inner, self.layers = map(int, values[:4])
        self.heads, self.kv_heads, self.head_dim, self.tied = map(int, values[4:])

    @property
    def params(self) -> int:
        return self._matrices + (1 - self.tied) * self.vocab * self.hidden + self._vectors

    @property
    def _matrices(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        block = attention + 3 * self.hidden * self.inner
        return self.layers * block + self.vocab * self.hidden

    @property
    def _vectors(self) -> int:
        return self.layers * 2 * (self.hidden + self.head_dim) + self.hidden

    def flops(self, sequence: int) -> float:
        """Return the model's operations for one token, forward and backward, without recomputation.

        Args:
            sequence: tokens of a sequence; attention is causal.
        """
        attention = self.layers * sequence * self.heads * self.head_dim
        return 6.0 * (self._matrices + attention)


class Attention(nn.Module):
    """Causal attention with grouped keys, normalized queries and keys, and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.hidden, queries, bias=False)
        self.k = nn.Linear(shape.hidden, keys, bias=False)
        self.v = nn.Linear(shape.hidden, keys, bias=False)
        self.o = nn.Linear(queries, shape.hidden, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(shape.head_dim, 1e-6) for _ in range(2))

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        heads = (*hidden.shape[:2], -1, self.shape.head_dim)
        query = _rotated(self.q_norm(self.q(hidden).view(heads)).transpose(1, 2), *rotary)
        key = _rotated(self.k_norm(self.k(hidden).view(heads)).transpose(1, 2), *rotary)
        value = self.v(hidden).view(heads).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            query.to(value.dtype), key.to(value.dtype), value, is_causal=True, enable_gqa=True
        )
        return self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines


class Block(nn.Module):
    """Attention and a gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)
        self.before, self.between = (nn.RMSNorm(shape.hidden, 1e-6) for _ in range(2))

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.attention(self.before(hidden), rotary)
        normed = self.between(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Returns the mean loss of the next tokens; weights are random with a fixed seed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, 1e-6)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, FP32, 0-D.

        Args:
            ids: int64, ``(sequences, tokens)``.
            labels: the token after each, int64, of the same shape.
        """
        hidden = self.embedding(ids)
        rotary = _rotary(ids.shape[1], self.shape.head_dim, hidden)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, rotary, **_AGAIN)
        rows, targets = self.norm(hidden).flatten(0, 1).split(ROWS), labels.flatten().split(ROWS)
        losses = [
            checkpoint(self._loss, *each, **_AGAIN) for each in zip(rows, targets, strict=True)
        ]
        return torch.stack(losses).sum() / labels.numel()

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(hidden).float(), targets, reduction="sum")


_AGAIN = {"use_reentrant": False, "preserve_rng_state": False}


def _rotary(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the positions, ``(length, width)``, in the dtype of ``like``."""
    powers = torch.arange(0, width, 2, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(length, dtype=torch.float32), 1e6**-powers).repeat(1, 2)
    return angles.cos().to(like.device, like.dtype), angles.sin().to(like.device, like.dtype)


def build(name: str, device: torch.device, dtype: torch.dtype) -> Model:
    """Return a model of a shape, the same values on every call.

    Args:
        name: of :class:`Shape`.
        dtype: of all parameters.
    """
    torch.manual_seed(0)
    model = empty(name, torch.device(device if device.type == "cuda" else "cpu"), dtype)
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.02)
    return model.to(device)


def empty(name: str, device: torch.device, dtype: torch.dtype) -> Model:
    """Return a model of a shape as torch initializes it, also on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Model(Shape(name))
    finally:
        torch.set_default_dtype(before)
