"""Tables, JSON and a picture of measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import platform
import textwrap
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table

import mp_optim
from benchmarks.ours import OURS
from benchmarks.section import Section
from mp_optim.kernels.native_library import native_library

_FORMATS = {
    "ms": "{:.2f}",
    "spread": "±{:.1%}",
    "gbs": "{:.1f}",
    "of_limit": "{:.2f}",
    "gparams": "{:.3f}",
    "times_ours": "{:.2f}x",
    "times_one": "{:.2f}x",
    "speedup": "{:.2f}x",
    "state_bytes": "{:.2f}",
    "of_ours": "{:.3f}x",
    "hidden": "{:.0%}",
    "step_shorter": "{:.2f}x",
    "iteration_ms": "{:.1f}",
}
_HEADS = {
    "gbs": "GB/s",
    "of_limit": "of the memory limit",
    "gparams": "Gparam/s",
    "times_ours": "times ours",
    "times_one": "times one tensor",
    "state_bytes": "bytes a parameter, with the main param",
    "of_ours": "throughput, of our 8-bit kernel's",
    "hidden": "arithmetic hidden",
    "step_shorter": "step() shorter than sync's",
    "iteration_ms": "backward and step, ms",
}


_OPPONENTS = ("deepspeed", "megatron-core", "torchao", "bitsandbytes")


def _installed() -> dict[str, str]:
    found = {}
    for name in _OPPONENTS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), ""
    )
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mp_optim": mp_optim.__version__,
        "level": native_library().level,
        "opponents": _installed(),
        "date": date.today().isoformat(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _columns(section: Section) -> list[str]:
    return list(dict.fromkeys(key for row in section.rows.values() for key in row))


def _cell(key: str, value: float | None) -> str:
    return "" if value is None else _FORMATS.get(key, "{:,.4g}").format(value)


def show(console: Console, section: Section) -> None:
    """Print one section."""
    table = Table(title=section.title, title_justify="left", title_style="bold")
    columns = _columns(section)
    table.add_column("")
    for key in columns:
        table.add_column(_HEADS.get(key, key), justify="right")
    for name, row in section.rows.items():
        style = "bold" if name.startswith(OURS) else None
        table.add_row(name, *(_cell(key, row.get(key)) for key in columns), style=style)
    console.print(table)
    for name, why in section.missing.items():
        console.print(f"  missing: {name} ({why})", style="dim", highlight=False)


def markdown(sections: list[Section], limit: float, regime: str) -> str:
    where = machine()
    others = "".join(f"{name} {version}, " for name, version in where["opponents"].items())
    return (
        "# Steps on a CPU\n\n"
        "`python tools/benchmark_host.py` writes this page. Method and summary: "
        "[Benchmarks](../benchmarks.md#the-step-on-a-cpu).\n\n"
        f"{where['cpu']}, {where['threads']} threads, {where['level']}, "
        f"torch {where['torch']}, "
        f"{others}"
        f"{where['date']}. Memory limit {limit / 1e9:.1f} GB/s ({regime}).\n\n{tables(sections)}"
    )


def tables(sections: Sequence[Section]) -> str:
    lines = []
    for section in sections:
        columns = _columns(section)
        lines += [
            f"## {section.title}",
            "",
            "| | " + " | ".join(_HEADS.get(key, key) for key in columns) + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        lines += [
            f"| {name} | " + " | ".join(_cell(key, row.get(key)) for key in columns) + " |"
            for name, row in section.rows.items()
        ]
        lines += ["", *(f"Missing: {name} ({why})." for name, why in section.missing.items()), ""]
    return "\n".join(lines)


def plot(section: Section, path: Path, title: str) -> None:
    rows = sorted(section.rows.items(), key=lambda item: item[1]["ms"], reverse=True)
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(rows) + 1.2), dpi=150)
    colors = ["#08519c" if name.startswith(OURS) else "#bdbdbd" for name, _ in rows]
    labels = [textwrap.fill(name, 40) for name, _ in rows]
    bars = axes.barh(labels, [row["ms"] for _, row in rows], color=colors)
    axes.bar_label(bars, [f"{row['ms']:.1f} ms" for _, row in rows], padding=4, fontsize=9)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("milliseconds, less is better")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def write(folder: Path, sections: list[Section], limit: float, regime: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "machine": machine(),
        "limit_gbs": limit / 1e9,
        "regime": regime,
        "sections": [dataclasses.asdict(section) for section in sections],
    }
    (folder / "host.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (folder / "host.md").write_text(markdown(sections, limit, regime), encoding="utf-8")
    full = next((s for s in sections if s.title.startswith("Full")), None)
    if full is not None:
        plot(full, folder / "host.png", full.title)
