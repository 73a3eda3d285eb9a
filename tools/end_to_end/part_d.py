"""Part D: NVIDIA's own test of offloading, one GPU and a model of 0.6 B parameters."""

from __future__ import annotations

from end_to_end.part_a import JOB_COLUMNS, SMALL, job
from end_to_end.rows import Part, Row, Sizes

_ROWS = {
    "ours, 0": "ours, GPU, FP32",
    "ours, 0.5, overlap": "ours, host 0.5, overlap",
    "ours, 1, overlap": "ours, host, overlap",
    "ours, 1, speculative": "ours, host, speculative",
    "HybridDeviceOptimizer, 0": "Megatron HybridDeviceOptimizer, 0.0",
    "HybridDeviceOptimizer, 0.5": "Megatron HybridDeviceOptimizer, 0.5",
    "HybridDeviceOptimizer, 1": "Megatron HybridDeviceOptimizer, 1.0",
}
"""Name of a row (with the share on the host) to its contender."""


def rows(sizes: Sizes) -> list[Row]:
    """Return a row for each share. 44K tokens make a step of about 0.75 s, as in NVIDIA's test."""
    large = {"shape": "Qwen3-0.6B", "sequences": 11, "sequence": 4096, "micro": 11}
    small = {**SMALL, "shape": sizes.shape}
    arguments = small if sizes.miniature else {**large, "warmup": 3, "steps": 9}
    return [job(name, contender, 90, **arguments) for name, contender in _ROWS.items()]


PART = Part("Shares on the host: Qwen3-0.6B shape, 44K tokens a step", rows, JOB_COLUMNS, 3)
