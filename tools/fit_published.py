#!/usr/bin/env python
"""Peaks that others published next to those of a trace: the table of docs/fit.md. Prints markdown.

python tools/fit_published.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import transformers

from mp_optim.apps.fit.activations import (
    Timeline,
    as_fake,
    build_hf,
    checkpoint_blocks,
    hf_loss,
    trace,
)
from mp_optim.apps.fit.command import shipped
from mp_optim.apps.fit.fit import ERROR

GB, GIB = 10**9, 2**30
WORKSPACES = 2 * ((8 << 20) + (128 << 10) + (4 << 20))
"""Bytes of cuBLAS and cuBLASLt on an A100, for the threads of forward and backward; torch's
allocator counts them (``CUDABlas.cpp``; pytorch#120925)."""


@dataclass(frozen=True)
class Setting:
    """A model of bfloat16 parameters as others trained it.

    Attributes:
        source: link to the figures.
        model: shipped name.
        batch: tokens of a sequence, and sequences.
        checkpointing: whether blocks run forward again in backward.
        unit: bytes of the source's GB.
        assumed: settings that the source does not state, or states elsewhere.
        is_known: False if the peak depends on a shape that the source does not state.
        changes: settings of the shipped config that differ.
        copies: bytes of tensors that their program holds in backward, and transformers does not.
    """

    source: str
    model: str
    batch: tuple[int, int]
    checkpointing: bool
    unit: int
    assumed: str
    is_known: bool = True
    changes: tuple[tuple[str, int], ...] = ()
    copies: int = 0


@dataclass(frozen=True)
class Published:
    """One peak: ``state`` is bytes a parameter that the optimizer keeps on the device."""

    optimizer: str
    state: float
    peak: float
    releases: bool = False


LLAMA_7B = "meta-llama/Llama-2-7b-hf"
TORCHAO = Setting(
    "[torchao](https://github.com/pytorch/ao/tree/main/torchao/optim)",
    *(LLAMA_7B, (1024, 2), True, GIB),
    "peak in the step; GB are GiB; compiled",
)
TORCHTUNE_3B = Setting(
    "[torchtune, Llama 3.2 3B](https://github.com/pytorch/torchtune#optimization-flags)",
    *("meta-llama/Llama-3.2-1B", (4096, 2), False, GIB),
    "bf16 state (the row of 8-bit state comes later)",
    changes=(
        *(("hidden_size", 3072), ("num_hidden_layers", 28), ("num_attention_heads", 24)),
        ("head_dim", 128),
    ),
)
TORCHTUNE_7B = Setting(
    "[torchtune#961](https://github.com/pytorch/torchtune/pull/961)",
    *(LLAMA_7B, (2048, 4), True, GB),
    "their loop holds an FP32 copy of the logits in backward: 1.05 GB",
    copies=4 * (2048 - 1) * 32_000 * 4,
)
ALPACA = Setting(
    "[torchtune#527](https://github.com/pytorch/torchtune/pull/527)",
    *(LLAMA_7B, (1024, 2), True, GB),
    "2 x 1024 tokens; theirs are Alpaca's lengths",
    is_known=False,
)
FLASH = Setting(
    "[transformers#44438](https://github.com/huggingface/transformers/pull/44438)",
    *("Qwen/Qwen2.5-7B", (256, 8), False, GB),
    "batch 8 of 256 tokens; theirs is not stated",
    is_known=False,
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
    TORCHTUNE_3B: (Published("torch AdamW, bf16 state", 4, 60.0),),
    TORCHTUNE_7B: (Published("paged, step in backward", 0, 20.2, releases=True),),
    ALPACA: (Published("paged, step in backward", 0, 13.99, releases=True),),
    FLASH: (
        Published("torch AdamW, bf16 state", 4, 76.44),
        Published("FlashAdamW, 24 bits", FLASH_BYTES + 1, 69.79),
        Published("FlashAdamW, no main params", FLASH_BYTES, 62.15),
    ),
}


def main() -> None:
    print("\n".join(rows()))


def rows() -> Iterator[str]:
    """Yield the table's lines, and the largest shortfall of the settings that are known."""
    yield "| source | optimizer | published | here | published exceeds it by | assumed |"
    yield "|---" * 6 + "|"
    most = 0.0
    for setting, peaks in PEAKS.items():
        params, timeline = traced(setting)
        for peak in peaks:
            here = total(params, timeline, peak, setting.copies) / setting.unit
            excess = peak.peak / here - 1
            most = max(most, excess) if setting.is_known else most
            shown = f"{excess:+.1%}" if setting.is_known else f"({excess:+.1%})"
            cells = (setting.source, peak.optimizer, f"{peak.peak:.2f}", f"{here:.2f}", shown)
            yield f"| {' | '.join(cells)} | {setting.assumed} |"
    assert most <= ERROR, f"apps/fit/fit.py: ERROR must be at least {most:.3f}"
    yield ""
    yield (
        f"Where the source states the shape, published peaks are at most {most:.1%} above the "
        "estimate."
    )


def total(params: int, timeline: Timeline, peak: Published, copies: int) -> float:
    found = timeline.peak(lambda made: 0) if peak.releases else timeline.peak()
    stepping = 0 if peak.releases else timeline.grads
    working = max(found.activations + found.grads + copies, stepping)
    return params * (2 + peak.state) + working + WORKSPACES


def traced(setting: Setting) -> tuple[int, Timeline]:
    """Return parameters, and the timeline of a forward and a backward."""
    settings = {**shipped()[setting.model], **dict(setting.changes)}
    model = build_hf(transformers.AutoConfig.for_model(**settings))
    if setting.checkpointing:
        checkpoint_blocks(model)
    params = sum(param.numel() for param in model.parameters())
    return params, trace(model, as_fake(model), hf_loss(*setting.batch))


if __name__ == "__main__":
    main()
