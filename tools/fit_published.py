#!/usr/bin/env python
"""Peaks that others published beside those of a trace: the table of docs/fit.md. Prints markdown.

python tools/fit_published.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import transformers

from mp_optim.cli.fit import shipped
from mp_optim.planner.activations import (
    Batch,
    Timeline,
    as_fake,
    build_hf,
    checkpoint_blocks,
    hf_loss,
    trace,
)

GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Setting:
    """A model of bfloat16 parameters as others trained it; ``assumed`` is what they do not say."""

    source: str
    model: str
    batch: Batch
    checkpointing: bool
    unit: int
    assumed: str


@dataclass(frozen=True)
class Published:
    """One peak: ``state`` is bytes a parameter that the optimizer keeps on the device."""

    optimizer: str
    state: float
    peak: float
    releases: bool = False


TORCHAO = Setting(
    "[torchao](https://github.com/pytorch/ao/tree/main/torchao/optim)",
    *("meta-llama/Llama-2-7b-hf", Batch(1024, 2), True, GIB),
    "batch 2 and checkpointing (torchtune's config), 1024 tokens; GB are GiB",
)
TORCHTUNE = Setting(
    "[torchtune](https://github.com/pytorch/torchtune)",
    *("meta-llama/Llama-2-7b-hf", Batch(1024, 2), True, GIB),
    "batch 2, 1024 tokens; GB are GiB; theirs is reserved memory",
)
FLASH = Setting(
    "[transformers#44438](https://github.com/huggingface/transformers/pull/44438)",
    *("Qwen/Qwen2.5-7B", Batch(256, 8), False, GB),
    "Qwen2.5-7B, batch 8 (the Trainer's default) of 256 tokens",
)
BNB = 2 + 2 * 4 / 256  # two moments, an FP32 scale for each 256
FLASH_BYTES = 2 + 2 * 2 / 32  # two moments, a 16-bit scale for each 32
PEAKS = {
    TORCHAO: (
        Published("torch AdamW, bf16 state", 4, 51.6),
        Published("bitsandbytes 8-bit", BNB, 39.3),
        Published("torchao 8-bit", BNB, 39.1),
        Published("torchao 4-bit", 1 + 2 * 4 / 128, 33.2),
    ),
    TORCHTUNE: (Published("paged, step in backward", 0, 15.97, releases=True),),
    FLASH: (
        Published("torch AdamW, bf16 state", 4, 76.44),
        Published("FlashAdamW, 24 bits", FLASH_BYTES + 1, 69.79),
        Published("FlashAdamW, no main params", FLASH_BYTES, 62.15),
    ),
}


def main() -> None:
    print("\n".join(rows()))


def rows() -> Iterator[str]:
    """The table's lines."""
    yield "| source | optimizer | published | here | difference | assumed |"
    yield "|---" * 6 + "|"
    for setting, peaks in PEAKS.items():
        params, timeline = traced(setting)
        for peak in peaks:
            here = total(params, timeline, peak) / setting.unit
            difference = f"{100 * (here / peak.peak - 1):+.1f} %"
            cells = (setting.source, peak.optimizer, f"{peak.peak:.2f}", f"{here:.2f}", difference)
            yield f"| {' | '.join(cells)} | {setting.assumed} |"


def total(params: int, timeline: Timeline, peak: Published) -> float:
    """Bytes at the fullest moment: backward, or the step with all gradients."""
    found = timeline.peak(lambda made: 0) if peak.releases else timeline.peak()
    stepping = 0 if peak.releases else timeline.grads
    return params * (2 + peak.state) + max(found.activations + found.grads, stepping)


def traced(setting: Setting) -> tuple[int, Timeline]:
    """Parameters, and a forward and backward."""
    model = build_hf(transformers.AutoConfig.for_model(**shipped()[setting.model]))
    if setting.checkpointing:
        checkpoint_blocks(model)
    params = sum(param.numel() for param in model.parameters())
    return params, trace(model, as_fake(model), hf_loss(setting.batch))


if __name__ == "__main__":
    main()
