"""What a run shows in the terminal: live progress, and a table at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from training.metrics import StepRecord, TrainResult


class LiveProgress:
    """A bar with the numbers of the latest step; plain lines now and then where the output is no
    terminal."""

    def __init__(self, console: Console, first_step: int, steps: int) -> None:
        self._console, self._steps = console, steps
        self._smooth: float | None = None
        self._every = max(1, steps // 20)
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._progress.start()
        self._task = self._progress.add_task("train", total=steps, completed=first_step, numbers="")

    def on_step(self, record: StepRecord) -> None:
        self._smooth = (
            record.loss if self._smooth is None else 0.8 * self._smooth + 0.2 * record.loss
        )
        self._progress.update(
            self._task, completed=record.step + 1, numbers=_numbers(record, self._smooth)
        )
        due = (
            record.step % self._every == 0
            or record.step + 1 == self._steps
            or record.eval_loss is not None
        )
        if not self._console.is_terminal and due:
            line = f"step {record.step + 1}/{self._steps}  {_numbers(record, self._smooth)}"
            self._console.print(line, markup=True, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def _numbers(record: StepRecord, smooth: float) -> str:
    norm = "-" if record.grad_norm is None else f"{record.grad_norm:.3f}"
    speed = f"{record.tokens_per_s / 1e3:.1f}k tok/s"
    if record.milliseconds is not None:
        speed += f", {record.milliseconds:.0f} ms"
    text = f"loss [bold]{smooth:.3f}[/]  lr {record.lr:.1e}  norm {norm}  {speed}"
    if record.eval_loss is not None:
        text += f"  eval {record.eval_loss:.3f}"
    return text + ("  [red]skipped[/]" if record.skipped else "")


def print_summary(console: Console, result: TrainResult, history: Sequence[StepRecord]) -> None:
    """The end of a run. `history` holds the records of the runs it resumed from as well."""
    losses = [record.loss for record in history]
    table = Table(title="Training run", title_style="bold", show_header=False, min_width=60)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("model", params_in_words(result.num_params))
    last = losses[-(len(losses) // 20 + 1) :]
    table.add_row(
        "loss (nats/byte)",
        f"{_mean(losses[:1]):.3f} -> [bold green]{_mean(last):.3f}[/]"
        f"{f' (mean of the last {len(last)} steps)' if len(last) > 1 else ''}",
    )
    if result.eval_loss is not None:
        table.add_row("eval loss", f"{result.eval_loss:.3f}")
    table.add_row("speed", f"{result.tokens_per_s:,.0f} tokens/s, {result.seconds:.1f} s")
    table.add_row("skipped steps", str(sum(record.skipped for record in history)))
    for place, line in _places(result.description):
        table.add_row(f"optimizer on {place}", line)
    for name, path in result.paths.items():
        table.add_row(name, str(path))
    console.print(table)


def params_in_words(count: int) -> str:
    """Three digits of a number of parameters, with a unit."""
    unit, letter = (1e9, "B") if count >= 1e9 else (1e6, "M") if count >= 1e6 else (1e3, "k")
    return f"{count / unit:.3g} {letter} params"


def _places(description: Any) -> list[tuple[str, str]]:
    """Bytes and backends per place, from the rows of `optimizer.describe()`."""
    bytes_at: dict[str, int] = defaultdict(int)
    backends_at: dict[str, list[str]] = defaultdict(list)
    for row in getattr(description, "rows", ()):
        place, backend = str(row.place), str(row.backend)
        bytes_at[place] += int(row.bytes)
        if backend not in backends_at[place]:
            backends_at[place].append(backend)
    return [
        (place, f"{size / 2**20:,.1f} MiB, {', '.join(backends_at[place])}")
        for place, size in bytes_at.items()
    ]


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else float("nan")
