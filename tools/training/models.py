"""Hugging Face models built from their config classes with random weights; nothing is
downloaded."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn

from mp_optim import OptimizerConfig
from mp_optim.apps.float8 import quantize_weights
from training.config import ModelConfig

_CONFIG_CLASSES = {
    "llama": "LlamaConfig",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "deepseek_v3": "DeepseekV3Config",
    "olmoe": "OlmoeConfig",
}


def _family_fields(config: ModelConfig) -> dict[str, Any]:
    if config.family == "llama":
        return {"head_dim": config.head_dim}
    fields: dict[str, Any] = {"num_experts_per_tok": config.num_experts_per_tok}
    if config.family == "mixtral":
        return fields | {"num_local_experts": config.num_experts, "head_dim": config.head_dim}
    if config.family == "olmoe":
        return fields | {"num_experts": config.num_experts}
    fields["moe_intermediate_size"] = config.moe_intermediate_size or config.intermediate_size
    if config.family == "qwen3_moe":
        return fields | {
            "num_experts": config.num_experts,
            "head_dim": config.head_dim,
            "norm_topk_prob": True,
        }
    return fields | {
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.num_shared_experts,
        "first_k_dense_replace": config.first_dense_layers,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "n_group": config.num_expert_groups,
        "topk_group": config.top_expert_groups,
    }


def hf_config(config: ModelConfig, seq_length: int = 4096) -> transformers.PretrainedConfig:
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "max_position_embeddings": seq_length,
        "tie_word_embeddings": config.tie_embeddings,
        **_family_fields(config),
    }
    given = {name: value for name, value in fields.items() if value is not None}
    # Bytes have no special tokens; the defaults may lie outside the vocabulary.
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return getattr(transformers, _CONFIG_CLASSES[config.family])(**given, **no_tokens)


def params_dtype(config: OptimizerConfig) -> torch.dtype:
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else torch.float32


def build_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, seq_length: int
) -> nn.Module:
    with torch.device(device):
        # "eager" loops over the experts that got tokens: on the CPU many times faster than the
        # batched kernels.
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            hf_config(config, seq_length),
            dtype=dtype,
            experts_implementation=_experts_implementation(config),
        )
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            module.weight.is_embedding_or_output_parameter = True
    if config.float8_weights != "none":
        quantize_weights(model, rowwise=config.float8_weights == "row")
    return model.train()


def _experts_implementation(config: ModelConfig) -> str | None:
    return None if config.family == "llama" else "eager"
