"""Parts A and D: one job with every optimizer, and one with shares of it on the host."""

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
    "pinned": "host GiB page-locked by torch",
    "clips": "clips",
    "loss": "last loss",
}
SMALL = {"sequences": 2, "sequence": 32, "micro": 2, "warmup": 1}
_LARGE = {"shape": "Qwen3-4B", "sequences": 2, "sequence": 4096, "micro": 2}
_FIRST = (
    *("ours, GPU, FP32", "torch fused AdamW, FP32 params, autocast"),
    *("torch fused AdamW, pure bf16", "Megatron HybridDeviceOptimizer, 1.0"),
)
_OTHER_PART = (
    *("HybridDeviceOptimizer, 0.0", "HybridDeviceOptimizer, 0.5"),
    *("host 0.5, overlap", "SuperOffload"),
)
_LONG = (
    *("ours, GPU, FP32", "ours, host, speculative"),
    *("ours, streamed, 8-bit + remainder16", "Megatron HybridDeviceOptimizer, 1.0"),
)
"""Contenders at 64K tokens a step, too: their overhead is a smaller share of such a step."""
_SHARES = {
    "ours, 0": "ours, GPU, FP32",
    "ours, 0.5, overlap": "ours, host 0.5, overlap",
    "ours, 1, overlap": "ours, host, overlap",
    "ours, 1, speculative": "ours, host, speculative",
    "HybridDeviceOptimizer, 0": "Megatron HybridDeviceOptimizer, 0.0",
    "HybridDeviceOptimizer, 0.5": "Megatron HybridDeviceOptimizer, 0.5",
    "HybridDeviceOptimizer, 1": "Megatron HybridDeviceOptimizer, 1.0",
}
"""Row of part D, with the share on the host, to its contender."""
SLOW_ON_CPU = "torchao AdamW8bit"
"""It takes a second of each step of the miniature."""


def _job(name: str, contender: str, seconds: float, **arguments: Any) -> Row:
    source = CONTENDERS[contender].source
    return Row(name, "job:train", {"contender": contender, **arguments}, seconds, source)


def rows(sizes: Sizes) -> list[Row]:
    """Return the rows of part A: first the references, DeepSpeed last, then 64K tokens."""
    names = [name for name in CONTENDERS if not name.endswith(_OTHER_PART)]
    names.sort(key=lambda name: (name.startswith("DeepSpeed"), name not in _FIRST))
    short, longer, long = {**_LARGE, "warmup": 2, "steps": 3}, {**_LARGE, "sequences": 16}, _LONG
    longer |= {"warmup": 1, "steps": 2}
    fewer = {SLOW_ON_CPU: {"steps": 2}} if sizes.miniature else {}
    if sizes.miniature:
        short = {**SMALL, "shape": sizes.shape, "steps": sizes.steps}
        longer, long = {**short, "micro": 1}, _LONG[1:2]
    return [
        *(
            _job(f"{name}, 8K tokens", name, 100, **{**short, **fewer.get(name, {})})
            for name in names
        ),
        *(_job(f"{name}, 64K tokens", name, 120, **longer) for name in long),
    ]


def rows_of_shares(sizes: Sizes) -> list[Row]:
    """Return the rows of part D. 44K tokens make a step of about 0.75 s, as in NVIDIA's test."""
    job = {"shape": "Qwen3-0.6B", "sequences": 11, "sequence": 4096, "micro": 11}
    job |= {"warmup": 3, "steps": 9}
    if sizes.miniature:
        job = {**SMALL, "shape": sizes.shape, "steps": sizes.steps}
    return [_job(name, contender, 90, **job) for name, contender in _SHARES.items()]


PART = Part("One job, all optimizers: Qwen3-4B shape, blocks checkpointed", rows, JOB_COLUMNS, 8.8)
SHARES = Part(
    "Shares on the host: Qwen3-0.6B shape, 44K tokens a step", rows_of_shares, JOB_COLUMNS, 3
)
