"""The memory of a forward and backward pass traced with fake tensors equals the memory that torch's
profiler counts for real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mp_optim.apps.fit.activations import (
    Timeline,
    as_fake,
    build_hf,
    checkpoint_blocks,
    hf_loss,
    trace,
    track,
)

SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "intermediate_size": 256, "num_key_value_heads": 2, "vocab_size": 1024}
MOE = {**DECODER, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", **DECODER},
    "moe": {"model_type": "qwen3_moe", **MOE, "head_dim": 32},
    "vision": {
        **{"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        **{**SIZES, **NO_DROPOUT, "intermediate_size": 256, "image_size": 96, "patch_size": 8},
    },
    "encoder": {
        **{"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        **{**SIZES, **NO_DROPOUT, "intermediate_size": 256, "vocab_size": 1024},
    },
    "lora": {"model_type": "llama", **DECODER},
}
SEQ, SIZE = 256, 4


def exact(size: int) -> int:
    return size


def built(name: str, checkpointing: bool, depth: int = 2) -> Any:
    settings = {**MODELS[name], "num_hidden_layers": depth}
    config = transformers.AutoConfig.for_model(**settings)
    model = build_hf(config, lora=8 if name == "lora" else 0)
    if checkpointing:
        checkpoint_blocks(model)
    return model


def traced(model: Any) -> Timeline:
    with as_fake(model):
        return track(model, hf_loss(SEQ, SIZE), rounded=exact)


def allocated(model: Any) -> tuple[int, int]:
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    loss_of = hf_loss(SEQ, SIZE)
    # mkldnn allocates a different amount of memory on each CPU model.
    with torch.backends.mkldnn.flags(enabled=False):
        loss_of(model).backward()  # The first pass allocates tensors that later passes reuse.
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss_of(model).backward()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak, held


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", list(MODELS))
def test_traced_peak_equals_memory_of_a_real_backward(name: str, checkpointing: bool) -> None:
    timeline = traced(built(name, checkpointing))
    peak = timeline.peak()
    real, grads = allocated(built(name, checkpointing))
    assert timeline.grads == pytest.approx(grads, rel=1e-3)
    assert peak.activations + peak.grads == pytest.approx(real, rel=0.02)


def test_trace_counts_logits_apart_from_other_activations() -> None:
    model = built("dense", False)
    timeline = trace(model, as_fake(model), hf_loss(SEQ, SIZE), vocabulary=DECODER["vocab_size"])
    peak = timeline.peak()
    tokens = SEQ * SIZE
    assert peak.phase == "backward" and peak.logits >= 2 * 4 * tokens * DECODER["vocab_size"]
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_trace_counts_no_dropout_mask_for_fused_attention(checkpointing: bool) -> None:
    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 1024}
    configs = [transformers.GPT2Config(attn_pdrop=rate, **sizes) for rate in (0.1, 0.0)]
    models = [build_hf(config) for config in configs]
    for model in models:
        checkpoint_blocks(model, checkpointing)
    assert traced(models[0]).peak() == traced(models[1]).peak()


def test_trace_counts_replaced_attention_whose_function_has_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = traced(built("dense", False)).peak()
    real = nn.functional.scaled_dot_product_attention

    def other_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return real(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", other_attention)
    assert traced(built("dense", False)).peak() == expected
    assert nn.functional.scaled_dot_product_attention is other_attention


def test_traced_peak_excludes_gradients_that_are_released() -> None:
    model = built("dense", True)
    timeline = trace(model, as_fake(model), hf_loss(SEQ, SIZE))
    assert timeline.grads > 0
    assert timeline.peak(lambda made: 0).activations == max(m.activations for m in timeline.moments)
    held = timeline.peak(lambda made: timeline.grads)
    assert held.grads == timeline.grads
