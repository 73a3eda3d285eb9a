"""Throughput that is left with the optimizer off the GPU, against the tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from end_to_end.rows import Record

REFERENCE = "ours, GPU, FP32"
DRAWN = {
    "ours, host, speculative": "C0",
    "ours, streamed, 8-bit + remainder16": "C2",
    "ours, host, overlap": "C4",
    "Megatron HybridDeviceOptimizer, 1.0": "C3",
}
PUBLISHED = (
    {
        "name": "prime-rl, Qwen3-30B-A3B, 8 x H200, no clipping, by sequence length",
        "source": "https://github.com/PrimeIntellect-ai/prime-rl/pull/3234",
        "tokens": [8192, 16384, 32768, 65536],
        "retained": [0.44, 0.90, 1.0, 1.0],
    },
    {
        "name": "NeMo-RL with HybridDeviceOptimizer, Qwen3-0.6B, one H100",
        "source": "https://github.com/NVIDIA-NeMo/RL/pull/3628",
        "tokens": [],
        "retained": [0.45],
    },
    {
        "name": "Megatron-Bridge with HybridDeviceOptimizer, Qwen3-30B-A3B, 25 to 100 %",
        "source": "https://docs.nvidia.com/nemo/megatron-bridge/nightly/training/cpu-offloading.html",
        "tokens": [],
        "retained": [0.24, 0.53],
    },
)
"""Shares of the throughput without offloading that others published. Where the page has no number
of tokens, the share is drawn as a line."""


def points(records: list[Record]) -> dict[str, list[tuple[int, float]]]:
    """Return tokens of a step and the measured share of ``REFERENCE``'s throughput, by contender.

    Args:
        records: of part A.
    """
    found: dict[tuple[str, int], float] = {
        (each["arguments"]["contender"], each["columns"]["tokens_a_step"]): each["columns"][
            "tokens_per_s"
        ]
        for each in records
        if each["columns"]
    }
    shares: dict[str, list[tuple[int, float]]] = {}
    for (contender, tokens), rate in found.items():
        reference = found.get((REFERENCE, tokens))
        if reference and contender in DRAWN:
            shares.setdefault(contender, []).append((tokens, rate / reference))
    return shares


def draw(records: list[Record], curves: Mapping[str, list[list[float]]], file: Path) -> None:
    """Draw measured shares as dots, predicted ones as dashes, published ones in grey.

    Args:
        records: of part A.
        curves: predicted shares by contender, each with the tokens of a step.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    measured = points(records)
    for contender, color in DRAWN.items():
        tokens, shares = zip(*curves[contender], strict=True)
        axes.plot(
            tokens, shares, "--", color=color, label=f"{contender}: predicted, Qwen3-4B, H100"
        )
        if contender in measured:
            axes.plot(*zip(*sorted(measured[contender]), strict=True), "o-", color=color)
    for each, style in zip(PUBLISHED, ("s-", "-.", ":"), strict=True):
        if each["tokens"]:
            axes.plot(each["tokens"], each["retained"], style, color="0.5", label=each["name"])
        for share in each["retained"] if not each["tokens"] else ():
            axes.axhline(share, linestyle=style, color="0.5", label=each["name"])
    axes.set_xscale("log", base=2)
    axes.set_xticks([4096 << power for power in range(6)], [f"{4 << power}K" for power in range(6)])
    axes.set(
        xlabel="tokens a step, on each GPU", ylabel="share of the throughput without offloading"
    )
    axes.set_ylim(0, 1.05)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
