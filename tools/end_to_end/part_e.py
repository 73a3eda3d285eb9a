"""Part E: the step alone, next to Megatron-core's own optimizer with each Adam that it can find."""

from __future__ import annotations

import importlib.util
import sys
from itertools import product

import torch

from benchmarks import megatron
from end_to_end.rows import Columns, NotInstalledError, Part, Row, Sizes
from lab.gpu import speed
from lab.gpu.opponents import megatron_core

ADAMS = {"torch": (), "apex": ("apex",), "Transformer Engine": ("transformer_engine",)}
"""Module that Megatron takes each Adam from. It prefers the last that is installed."""


def rows(sizes: Sizes) -> list[Row]:
    """Return a row for each Adam and dtype of ``main_grad``."""
    params, rounds = (100_000, 1) if sizes.miniature else (1_000_000_000, 11)
    return [
        Row(
            f"Megatron-core, Adam of {adam}, {'FP32' if wide else 'bf16'} main_grad",
            "part_e:compare",
            {"adam": adam, "wide": wide, "params": params, "rounds": rounds},
            120,
            "https://docs.nvidia.com/megatron-core/developer-guide/latest/",
        )
        for wide, adam in product((True, False), ADAMS)
    ]


def compare(*, device: torch.device, adam: str, wide: bool, params: int, rounds: int) -> Columns:
    """Time Megatron's whole step and ours in turn, alone and queued behind other work.

    Args:
        adam: key of ``ADAMS``.
        wide: True for FP32 ``main_grad``, which Megatron's training script sets for bf16.
    """
    for name, modules in ADAMS.items():
        for module in modules:
            if name != adam:
                sys.modules[module] = None  # type: ignore[assignment]  # not found by Megatron
            elif importlib.util.find_spec(module) is None:
                raise NotInstalledError(module)
    if importlib.util.find_spec("megatron") is None:
        raise NotInstalledError("megatron-core")
    rate = speed.Rate(device)
    section = speed.steps(rate, params, rounds, [megatron_core(wide)])
    if section.missing:
        raise NotInstalledError("; ".join(section.missing.values()))
    found: Columns = {"adam": megatron.adam()}
    for label, row in section.rows.items():
        key = ("queued" if label.endswith("other work") else "alone", label.startswith("Mega"))
        found[f"{'theirs' if key[1] else 'ours'}_{key[0]}"] = row["ms"]
    for key in ("alone", "queued"):
        found[f"times_{key}"] = found[f"theirs_{key}"] / found[f"ours_{key}"]
    return found


PART = Part(
    "Megatron-core's own optimizer: the whole step of 1 B bf16 params, clipping on",
    rows,
    {
        "adam": "Adam that Megatron chose",
        "theirs_queued": "ms, queued",
        "ours_queued": "ours, queued",
        "times_queued": "times ours, queued",
        "theirs_alone": "ms, alone",
        "ours_alone": "ours, alone",
        "times_alone": "times ours, alone",
    },
    4,
)
