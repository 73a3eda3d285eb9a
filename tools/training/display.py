"""The output of a run in the terminal: a line now and then, and a summary at the end."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console

from training.metrics import StepRecord, TrainResult


class Progress:
    """A line for every twentieth of the steps, the last one and each evaluation."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._smooth: float | None = None

    def on_step(self, record: StepRecord) -> None:
        before = record.loss if self._smooth is None else self._smooth
        self._smooth = 0.8 * before + 0.2 * record.loss
        done = record.step + 1
        due = record.step % max(1, self._steps // 20) == 0 or done == self._steps
        if not due and record.eval_loss is None:
            return
        norm = "-" if record.grad_norm is None else f"{record.grad_norm:.3f}"
        line = f"step {done}/{self._steps}  loss {self._smooth:.3f}  lr {record.lr:.1e}  "
        line += f"norm {norm}  {record.tokens_per_s / 1e3:.1f}k tok/s"
        if record.milliseconds is not None:
            line += f", {record.milliseconds:.0f} ms"
        if record.eval_loss is not None:
            line += f"  eval {record.eval_loss:.3f}"
        self.print(line + "  skipped" * record.skipped)

    def print(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None: ...


def print_summary(console: Console, result: TrainResult, history: Sequence[StepRecord]) -> None:
    """Print the end of a run.

    Args:
        history: records of this run and of those that it resumed from.
    """
    losses = [record.loss for record in history] or [float("nan")]
    last = losses[-(len(losses) // 20 + 1) :]
    rows = {
        "model": params_in_words(result.num_params),
        "loss (nats/byte)": f"{losses[0]:.3f} -> {statistics.mean(last):.3f} "
        f"(mean of the last {len(last)} steps)",
        "speed": f"{result.tokens_per_s:,.0f} tokens/s, {result.seconds:.1f} s",
        "skipped steps": str(sum(record.skipped for record in history)),
    }
    if result.eval_loss is not None:
        rows["eval loss"] = f"{result.eval_loss:.3f}"
    places = defaultdict(list)
    for row in result.description.rows:
        places[str(row.place)].append(row)
    for place, found in places.items():
        backends = ", ".join(dict.fromkeys(str(row.backend) for row in found))
        size = sum(row.bytes for row in found) / 2**20
        rows[f"optimizer on {place}"] = f"{size:,.1f} MiB, {backends}"
    rows |= {name: str(path) for name, path in result.paths.items()}
    for name, value in rows.items():
        console.print(f"{name:20} {value}", markup=False, highlight=False, soft_wrap=True)


def params_in_words(count: int) -> str:
    """Return three digits of a number of parameters, with a unit."""
    unit, letter = (1e9, "B") if count >= 1e9 else (1e6, "M") if count >= 1e6 else (1e3, "k")
    return f"{count / unit:.3g} {letter} params"
