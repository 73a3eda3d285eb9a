"""Part A: one job, all optimizers, at 8K and at 64K tokens a step."""

from __future__ import annotations

from typing import Any

from end_to_end.contenders import CONTENDERS
from end_to_end.rows import Part, Row, Sizes

JOB_COLUMNS = {
    "tokens_per_s": "tokens/s",
    "iteration_ms": "ms a step",
    "step_ms": "of them after backward",
    "tflops": "TFLOPS of the model",
    "of_matmul": "of the card's matmul rate",
    "allocated": "peak GiB allocated",
    "reserved": "peak GiB reserved",
    "rss": "host GiB resident",
    "pinned": "host GiB page-locked",
    "clips": "clips",
    "loss": "last loss",
}
SMALL = {"shape": "tiny", "sequences": 2, "sequence": 32, "micro": 2, "warmup": 1, "steps": 2}
_LARGE = {"shape": "Qwen3-4B", "sequences": 2, "sequence": 4096, "micro": 2}
_LONG = (
    "ours, GPU, FP32",
    "ours, host, speculative",
    "ours, streamed, 8-bit + remainder16",
    "ours, host, overlap",
    "Megatron HybridDeviceOptimizer, 1.0",
    "torch fused AdamW, pure bf16",
    "torchao CPUOffloadOptimizer",
    "DeepSpeed ZeRO-Offload",
)
"""Contenders at 64K tokens a step, too: those whose share of a step shrinks with it."""
_FIRST = (
    *("ours, GPU, FP32", "torch fused AdamW, FP32 params, autocast"),
    *("torch fused AdamW, pure bf16", "Megatron HybridDeviceOptimizer, 1.0"),
)
_OTHER_PART = ("HybridDeviceOptimizer, 0.0", "HybridDeviceOptimizer, 0.5", "host 0.5, overlap")


def job(name: str, contender: str, seconds: float, **arguments: Any) -> Row:
    """Return the row of a job with a contender."""
    source = CONTENDERS[contender].source
    return Row(name, "job:train", {"contender": contender, **arguments}, seconds, source)


def rows(sizes: Sizes) -> list[Row]:
    """Return the rows: those that others are compared with first, DeepSpeed last."""
    names = [name for name in CONTENDERS if not name.endswith(_OTHER_PART)]
    names.sort(key=lambda name: (name.startswith("DeepSpeed"), name not in _FIRST))
    if sizes.miniature:
        small = {**SMALL, "shape": sizes.shape}
        short = [job(f"{name}, 8K tokens", name, 60, **small) for name in names]
        return [*short, job(f"{_LONG[1]}, 64K tokens", _LONG[1], 60, **{**small, "micro": 1})]
    short = [job(f"{name}, 8K tokens", name, 100, **_LARGE, warmup=3, steps=5) for name in names]
    longer = {**_LARGE, "sequences": 16, "warmup": 1, "steps": 3}
    return [*short, *(job(f"{name}, 64K tokens", name, 120, **longer) for name in _LONG)]


PART = Part("One job, all optimizers: Qwen3-4B shape, blocks checkpointed", rows, JOB_COLUMNS, 16)
