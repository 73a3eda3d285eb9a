"""tools/benchmark_training.py in a miniature: rows, records and the generated page."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import benchmark_training
import pytest
import torch
from benchmark_training import PREDICTIONS, Row, markdown, record_of, rows, run

from end_to_end.contenders import NotInstalledError
from support.launch import ROOT, TOOLS, run_forked_program

CPU = torch.device("cpu")
ENDLESS = Row("A", "r", "torch fused AdamW, pure bf16", "tiny", 2, 32, 2, 0, 10**6, 2.0)


@pytest.mark.slow
def test_benchmark_training_records_every_row_once_in_a_miniature(tmp_path: Path) -> None:
    """Rivals that are not installed or refuse a CPU have a record with that cause."""
    command = (str(TOOLS / "benchmark_training.py"), "--miniature", "--patience", "4")
    printed = run_forked_program(*command, "--output", str(tmp_path))
    same = set()
    for row in rows(miniature=True):
        record = record_of(tmp_path, row)
        assert record and f"{row.part}: {row.name}: " in printed
        if not row.name.startswith("ours"):
            continue
        columns = record["columns"]
        assert columns and columns["loss"] < columns["loss_first"] and record["facts"]["commit"]
        if "8-bit" not in row.name and "64K" not in row.name:
            same.add(columns["loss"])
    assert len(same) == 1
    again = run_forked_program(*command, "--only", "ours", "--output", str(tmp_path))
    assert again.strip() == ""


def test_benchmark_training_records_the_reason_when_a_row_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(ENDLESS, seconds=60.0)
    for error, cause in (
        (torch.OutOfMemoryError("3 GiB"), "OutOfMemoryError: 3 GiB"),
        (NotInstalledError("apex"), "not installed: apex"),
        (ValueError("no clipping\nat all"), "ValueError: no clipping"),
        (None, "ended with -9: see r.log"),
    ):

        def train(row: Row, device: torch.device, error: Exception | None = error) -> None:
            if error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise error

        monkeypatch.setattr(benchmark_training, "train", train)
        record = run(tmp_path, row, CPU)
        assert record["columns"] is None and record["cause"] == cause
        assert record_of(tmp_path, row) == record
        assert record_of(tmp_path, replace(row, steps=1)) is None
    monkeypatch.undo()
    assert run(tmp_path, ENDLESS, CPU)["cause"] == "took more than 2 s"


def test_training_benchmark_page_equals_its_generated_report() -> None:
    folder = ROOT / "docs" / "benchmarks"
    command = "run: python tools/benchmark_training.py --report --output docs/benchmarks"
    assert markdown(folder) == (folder / "training.md").read_text(), command


def test_benchmark_report_marks_a_prediction_refuted_when_a_value_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(row for row in rows(miniature=False) if row.name == "ours, 1, overlap")
    expected = PREDICTIONS["D"][row.name]
    for factor, verdict in (
        (1.2, "refuted: peak GiB allocated; host GiB"),
        (1 / 1.4, "refuted: tokens/s"),
        (1.0, ""),
    ):
        values = {key: value * factor for key, value in expected.items()}
        monkeypatch.setattr(benchmark_training, "train", lambda *_, values=values: values)
        run(tmp_path, row, CPU)
        line = markdown(tmp_path).split(row.name)[1].splitlines()[0]
        assert line.endswith(f"| {verdict} |")
