"""What a model and its optimizer take on one rank, before anything is allocated.

$ mp-optim plan --model path/to/config.json --dp 8 --ep 8 --gpu-memory 80
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from mp_optim import OptimizerConfig
from mp_optim.cli.shell import console, status_of
from mp_optim.planner import (
    Layout,
    MemoryPlan,
    SweepRow,
    smallest_fraction,
    specs_of,
    sweep,
)

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30
Gibibytes = Annotated[float | None, tyro.conf.arg(metavar="GIB")]


@dataclass
class Options:
    """What to plan for. Memory is in GiB (2**30 bytes) on one rank."""

    model: Path
    """A Hugging Face config.json, or the folder it is in."""
    optimizer: Path | None = None
    """A YAML file with fields of OptimizerConfig; by default AdamW for bf16."""
    layout: tyro.conf.OmitArgPrefixes[Layout] = field(default_factory=Layout)
    gpu_memory: Gibibytes = None
    """GiB that may be taken of the accelerator: finds the smallest fraction on the host for it."""
    host_memory: Gibibytes = None
    """GiB that the host has for this rank."""
    fractions: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Shares of the optimizer on the host, one line of the table each."""
    output: Path | None = None
    """Folder for plan.md and plan.png."""


def load(path: Path, optimizer: Path | None) -> tuple[Any, OptimizerConfig]:
    """The model's config and the optimizer's: AdamW for bf16 unless a file says otherwise.

    Raises:
        ValueError: a file does not hold what it should.
    """
    import transformers

    if not path.exists():  # else it would be taken for a name on the Hub
        raise FileNotFoundError(f"--model {path}: no such file or folder")
    config = OptimizerConfig.from_dict(_settings(optimizer))
    return transformers.AutoConfig.from_pretrained(path), config


def _settings(optimizer: Path | None) -> dict[str, Any]:
    """Fields of the optimizer's config, from a YAML file if there is one."""
    import yaml

    if optimizer is None:
        return {"lr": 1e-4, "bf16": True}
    try:
        settings = yaml.safe_load(optimizer.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ValueError(f"--optimizer {optimizer} is not YAML: {where}") from error
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"--optimizer {optimizer}: must hold fields of OptimizerConfig, such as lr: 1.0e-4"
        )
    return dict(settings)


def table(rows: list[SweepRow], options: Options) -> Table:
    """One line a plan; what does not fit is red."""
    from rich.table import Table

    shown = Table(title=f"GiB per rank: {options.model.stem}, {_words(options.layout)}")
    shown.add_column("state")
    disk = ["disk"] if has_disk(rows) else []
    heads = ["fraction", "accelerator", "pinned host", "pageable host", *disk, "host"]
    heads.append("saving")  # in the background: more host memory
    for head in heads:
        shown.add_column(head, justify="right")
    for row in rows:
        form, fraction, accelerator, *host = cells(row, has_disk(rows))
        held, limit = row.plan.accelerator.total, options.gpu_memory
        if limit is not None and held > limit * GIB:
            accelerator = f"[red]{accelerator}[/red]"
        of_host = row.plan.host_total, row.plan.background_save
        ends = [f"{size / GIB:.2f}" for size in of_host]
        shown.add_row(form, fraction, accelerator, *host, *ends)
    return shown


def has_disk(rows: list[SweepRow]) -> bool:
    """Whether some of it lies on a disk."""
    return any(row.plan.disk.total for row in rows)


def cells(row: SweepRow, shows_disk: bool) -> list[str]:
    """State and fraction of a plan; accelerator, pinned and pageable host memory in GiB, and the
    disk."""
    plan = row.plan
    parts = [plan.accelerator, plan.pinned_host, plan.pageable_host]
    if shows_disk:
        parts.append(plan.disk)
    return [
        row.form,
        f"{plan.fraction:g}",
        *(f"{part.total / GIB:.2f}" for part in parts),
    ]


def _words(layout: Layout) -> str:
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "ep"))
    return f"{sizes}, {layout.sharding}"


def markdown(rows: list[SweepRow]) -> str:
    """The same as a table for documents."""
    on_disk = has_disk(rows)
    heads = ["state", "fraction on the host", "accelerator, GiB", "pinned host, GiB"]
    heads += ["pageable host, GiB", *(["disk, GiB"] if on_disk else [])]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {' | '.join(cells(row, on_disk))} |" for row in rows]
    return "\n".join(lines) + "\n"


def draw(path: Path, rows: list[SweepRow], options: Options) -> None:
    """Accelerator and host bytes over the fraction, a line for each form of state."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(
        1, 2, figsize=(10, 4), layout="constrained", sharey=False
    )
    for form in dict.fromkeys(row.form for row in rows):
        plans = [row.plan for row in rows if row.form == form]
        fractions = [plan.fraction for plan in plans]
        accelerator = [plan.accelerator.total / GIB for plan in plans]
        host = [plan.host_total / GIB for plan in plans]
        for axes, sizes in zip(places, (accelerator, host), strict=True):
            axes.plot(fractions, sizes, marker="o", label=form)
    for axes, title, limit in zip(
        places,
        ("accelerator", "host"),
        (options.gpu_memory, options.host_memory),
        strict=True,
    ):
        axes.set(
            title=title,
            xlabel="share of the optimizer on the host",
            ylabel="GiB per rank",
            ylim=(0, None),
        )
        if limit is not None:
            axes.axhline(limit, color="red", linewidth=0.8, linestyle="--")
        axes.grid(alpha=0.25)
    places[0].legend(frameon=False)
    figure.suptitle(f"{options.model.stem}, {_words(options.layout)}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def fitting(options: Options, source: Any, config: OptimizerConfig) -> MemoryPlan:
    """The plan with the smallest fraction that fits."""
    host = None if options.host_memory is None else int(options.host_memory * GIB)
    return smallest_fraction(
        source,
        config,
        options.layout,
        gpu_memory=int((options.gpu_memory or 0) * GIB),
        host_memory=host,
    )


def report(source: Any, config: OptimizerConfig, options: Options) -> int:
    """Print what a model takes, and write it where ``options.output`` says; returns the exit
    status.

    Args:
        source: the model's config, as Hugging Face has it.
    """
    specs, out = specs_of(source), console()
    rows = sweep(specs, config, options.layout, fractions=options.fractions)
    billions = sum(spec.numel for spec in specs) / 1e9
    out.print(f"{billions:.2f} B params in {len(specs)} tensors", highlight=False)
    out.print(table(rows, options))
    if options.gpu_memory is not None:
        smallest = fitting(options, specs, config)
        print(
            f"optimizer_offload_fraction={smallest.fraction:g} is the smallest that fits "
            f"{options.gpu_memory:g} GiB:\n{smallest}"
        )
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "plan.md").write_text(markdown(rows), encoding="utf-8")
        draw(options.output / "plan.png", rows, options)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line; returns the exit status."""
    options = tyro.cli(
        Options, args=arguments, prog="mp-optim plan", description=__doc__
    )
    return report(*load(options.model, options.optimizer), options)


if __name__ == "__main__":
    sys.exit(status_of(lambda: main(sys.argv[1:])))
