"""Which parameters Muon steps: hidden matrices and experts' stacks of them. The rest is for the
scalar optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim.config import OptimizerConfig
from mp_optim.slots import param_attributes

_BY_HEADS = ("linear_qkv", "q_proj", "k_proj", "v_proj")
_EMBEDDINGS = ("embed_tokens", "word_embeddings", "lm_head", "output_layer")


def is_embedding_or_output(param: Tensor, name: str) -> bool:
    """Megatron's attribute ``is_embedding_or_output_parameter``, or, where it is absent, a part of
    the FQN."""
    named = any(part in _EMBEDDINGS for part in name.split("."))
    said = param_attributes.is_embedding_or_output(param)
    return named if said is None else said


def _whole_shape(param: Tensor) -> torch.Size:
    """The shape of what a tensor may be a flat part of."""
    whole = param_attributes.shard_info(param).whole_shape
    return param.shape if whole is None else whole


def is_hidden_matrix(param: Tensor, name: str, is_expert: bool) -> bool:
    """Whether Muon steps a parameter if nobody says otherwise, as far as it tells itself: a matrix,
    or an expert's stack of them, that is neither an embedding nor the output layer, and whose
    ``use_muon`` is not false."""
    dims = len(_whole_shape(param))
    return (
        (dims == 2 or (dims == 3 and is_expert))
        and param_attributes.is_for_muon(param)
        and not is_embedding_or_output(param, name)
    )


class MuonAssignment:
    """Says for each parameter of a model which rule steps it, and how a fused QKV weight is cut.

    Args:
        model_chunks: whose embeddings and output layers are told also by their modules:
            ``nn.Embedding``, and what Hugging Face's ``get_output_embeddings()`` names.
    """

    def __init__(
        self, model_chunks: Sequence[nn.Module], config: OptimizerConfig
    ) -> None:
        self._config = config
        self._embeddings = {
            id(param)
            for chunk in model_chunks
            for module in _embeddings(chunk)
            for param in module.parameters(recurse=False)
        }
        self._sizes = {
            id(param): getattr(chunk, "config", None)
            for chunk in model_chunks
            for param in chunk.parameters()
        }

    def settings(
        self, param: Tensor, name: str, is_expert: bool, override: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The overrides of a parameter with ``optimizer`` among them, ``qkv_split_shapes`` where it
        is fused, and ``head_rows`` where its heads are split.

        Raises:
            ValueError: it is fused, and nobody says how; or it is no matrix and an override says
                ``muon``.
        """
        chosen = override.get(
            "optimizer",
            "muon"
            if self.is_hidden(param, name, is_expert)
            else self._config.muon_scalar_optimizer,
        )
        if chosen != "muon":
            return {**override, "optimizer": chosen}
        shape = _whole_shape(param)
        if len(shape) < 2:
            raise ValueError(
                f"{name} has shape {tuple(shape)}: override optimizer='muon' is for matrices"
            )
        heads = override.get("head_rows", self._head_rows(param, name))
        if heads is not None:
            _check_rows(param, name, "head_rows", heads, heads)
            return {**override, "optimizer": chosen, "head_rows": heads}
        parts = override.get("qkv_split_shapes", self._qkv_parts(param, name))
        if parts is None:
            return {**override, "optimizer": chosen}
        _check_rows(param, name, "the sum of qkv_split_shapes", parts, sum(parts))
        return {**override, "optimizer": chosen, "qkv_split_shapes": parts}

    def is_hidden(self, param: Tensor, name: str, is_expert: bool) -> bool:
        """As :func:`is_hidden_matrix`, and no embedding by its module."""
        return id(param) not in self._embeddings and is_hidden_matrix(
            param, name, is_expert
        )

    def _head_rows(self, param: Tensor, name: str) -> int | None:
        """Rows of each head, of the names that Megatron and Hugging Face give such weights."""
        if not self._config.muon_split_heads:
            return None
        is_attention = name.removesuffix(".weight").split(".")[-1] in _BY_HEADS
        if not is_attention and not param_attributes.is_qkv(param):
            return None
        sizes = self._sizes.get(id(param))
        for field in ("kv_channels", "head_dim"):
            if rows := getattr(sizes, field, None):
                return int(rows)
        hidden, heads = (
            getattr(sizes, field, None)
            for field in ("hidden_size", "num_attention_heads")
        )
        if hidden and heads:
            return int(hidden // heads)
        raise ValueError(
            f"{name} is an attention weight and muon_split_heads=True, but the model's config does "
            "not say how many rows a head has (kv_channels, head_dim, or hidden_size and "
            "num_attention_heads); override head_rows, with None for a weight without heads"
        )

    def _qkv_parts(self, param: Tensor, name: str) -> tuple[int, ...] | None:
        """Megatron's rows per query group: queries, a gate where the model's attention has one,
        keys, values."""
        fused = param_attributes.is_qkv(param) or name.endswith("linear_qkv.weight")
        if not self._config.muon_split_qkv or not fused:
            return None
        if (parts := param_attributes.qkv_split_shapes(param)) is not None:
            return parts
        sizes = self._sizes.get(id(param))
        heads, groups, width = (
            getattr(sizes, field, None)
            for field in ("num_attention_heads", "num_query_groups", "kv_channels")
        )
        if not heads or not groups or not width:
            raise ValueError(
                f"{name} is a fused QKV weight and muon_split_qkv=True, but the model's config "
                "does not "
                "say how it is laid out (num_attention_heads, num_query_groups, kv_channels); "
                "override "
                "qkv_split_shapes=(rows of Q, of K, of V in each group), or set "
                "muon_split_qkv=False"
            )
        queries = heads // groups * width
        gate = (queries,) if getattr(sizes, "attention_output_gate", False) else ()
        return (queries, *gate, width, width)


def _check_rows(param: Tensor, name: str, what: str, value: Any, rows: int) -> None:
    if (height := _whole_shape(param)[-2]) % rows:
        raise ValueError(
            f"{name} has {height} rows, which is no multiple of {what}={value}"
        )


def _embeddings(chunk: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = [
        module for module in chunk.modules() if isinstance(module, nn.Embedding)
    ]
    output = getattr(chunk, "get_output_embeddings", lambda: None)()
    return [*found, output] if isinstance(output, nn.Module) else found
