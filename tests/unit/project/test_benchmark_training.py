"""tools/benchmark_training.py in a miniature run: rows, records and the generated page."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_training
import pytest
import torch
from benchmark_training import Options

from end_to_end import measure, report, runner
from end_to_end.model import Shape, build
from end_to_end.report import PARTS
from end_to_end.rows import NotInstalledError, Row, Sizes
from support.kernels import needs_kernels
from support.launch import ROOT, TOOLS, run_forked_program

NEEDS_A_GPU = {
    "torchao CPUOffloadOptimizer": "only supports CUDA",
    "FlashAdamW": "requires a CUDA device",
}
"""Rival libraries that refuse a CPU, with words of the error message of each library."""
BUILDS = "DeepSpeed"
"""A rival library that compiles C++ for a minute at the first use."""


def miniature(folder: Path, *arguments: str) -> str:
    program = str(TOOLS / "benchmark_training.py")
    always = ("--miniature", "--patience", "4", "--output", str(folder))
    return run_forked_program(program, *always, *arguments)


def records(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    parts = json.loads((folder / "training.json").read_text())["parts"]
    return {each["name"]: each for each in parts[part]}


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["E", "DA", "BC"])
def test_benchmark_training_records_every_row_once_in_a_miniature_run(parts, tmp_path, monkeypatch):
    """If a rival library is not installed or refuses a CPU, the record of its row gives that
    cause."""
    printed = miniature(tmp_path, "--part", *parts)
    for part in parts:
        assert all(f": {row.name}: " in printed for row in PARTS[part].rows(Sizes(True)))
        for name, record in records(tmp_path, part).items():
            refused = next((why for who, why in NEEDS_A_GPU.items() if name.startswith(who)), "")
            if record["cause"].startswith("not installed: ") or name.startswith(BUILDS):
                continue
            if record["arguments"].get("gpu") == "1MiB":  # This GPU limit is too small on purpose.
                refused = "not tried: does not fit"
            if refused:
                assert refused in record["cause"], record
                continue
            assert record["cause"] == "" and record["columns"], record
            assert record["facts"]["commit"] and record["facts"]["torch"]
            assert next((tmp_path / "training" / part).glob("*.log"), None)
    if parts != "E":  # Rows of part E need a GPU, so the next call tries them again.
        before = (tmp_path / "training.json").read_text()
        monkeypatch.delattr(runner, "run")  # A part with results must not run again.
        benchmark_training.main(Options((parts[0],), tmp_path, miniature=True))
        assert (tmp_path / "training.json").read_text() == before


@needs_kernels
@pytest.mark.parametrize(
    ("rows", "count"), [("speculative", 2), pytest.param("ours", 6, marks=pytest.mark.slow)]
)
def test_benchmark_training_runs_part_a_without_races_on_a_simulated_device(rows, count, tmp_path):
    """The simulated device raises an error for a race or a missing wait."""
    miniature(tmp_path, "--part", "A", "--only", rows, "--device", "simulated")
    found = {name: each for name, each in records(tmp_path, "A").items() if rows in name}
    assert len(found) == count and all(each["columns"] for each in found.values()), found


def test_benchmark_runner_records_the_reason_when_a_row_fails(tmp_path, monkeypatch):
    results, row = runner.Results(tmp_path), Row("a row", "measure:card")
    for action, cause, is_finished in (
        (raising(torch.OutOfMemoryError("3 GiB")), "out of memory: 3 GiB", True),
        (raising(RuntimeError("cudaHostAlloc: out of memory")), "out of memory: cuda", True),
        (raising(NotInstalledError("apex")), "not installed: apex", False),
        (raising(ValueError("no clipping\nat all")), "ValueError: no clipping", True),
        (lambda **_: os.kill(os.getpid(), signal.SIGKILL), "killed by signal 9: see a", True),
    ):
        monkeypatch.setattr(measure, "card", action)
        record = runner.run(results, "A", row, "cpu")
        assert record["columns"] is None and record["cause"].startswith(cause), record
        assert results.is_finished("A", row, retry=False) == is_finished
        assert not results.is_finished("A", row, retry=True)
    assert "cudaHostAlloc" not in results.file("A", row).with_suffix(".log").read_text()


def raising(error: Exception) -> Callable[..., None]:
    def call(**arguments: object) -> None:
        raise error

    return call


def test_benchmark_runner_ends_a_row_at_its_time_or_memory_limit(tmp_path):
    arguments = {"shape": "tiny", "contender": "torch fused AdamW, pure bf16", "warmup": 0}
    endless = {**arguments, "sequences": 2, "sequence": 32, "micro": 2, "steps": 10**6}
    record = runner.run(runner.Results(tmp_path), "A", Row("r", "job:train", endless, 2.0), "cpu")
    assert record["cause"] == "took more than 2 s"
    greedy = Row("r", "job:train", endless, 60.0, host_left=1e9)
    record = runner.run(runner.Results(tmp_path), "A", greedy, "cpu")
    assert record["columns"] is None and record["cause"].startswith("out of memory: ")


def test_training_benchmark_page_equals_its_generated_report(tmp_path):
    folder = ROOT / "docs" / "benchmarks"
    found = report.collected(runner.Results(folder), Sizes())
    data = json.loads((folder / "training.json").read_text())
    command = "run: python tools/benchmark_training.py --report --output docs/benchmarks"
    assert json.loads(json.dumps(found)) == data["parts"], command
    assert report.markdown(found) == (folder / "training.md").read_text(), command
    predicted = [row["predicted"] for part in PARTS if part != "card" for row in found[part]]
    assert all(predicted)


def test_benchmark_report_marks_a_prediction_refuted_when_a_value_differs():
    row = next(row for row in PARTS["D"].rows(Sizes()) if row.name == "ours, 1, overlap")
    expected = report.PREDICTIONS["D"][row.name]
    record = {"name": row.name, "source": "", "cause": "", "predicted": expected}
    nothing: dict[str, list[Any]] = {name: [] for name in PARTS}
    for factor, verdict in (
        (1.2, "refuted: peak GiB allocated"),
        (1 / 1.4, "refuted: tokens/s"),
        (1.0, ""),
    ):
        record["columns"] = {key: value * factor for key, value in expected.items()}
        line = report.markdown({**nothing, "D": [record]}).split(row.name)[1].splitlines()[0]
        assert line.endswith(f"| {verdict} |")


def test_benchmark_shape_counts_as_many_params_as_its_model():
    for name, params in (("tiny", 1_901_952), ("atom", None)):
        model = build(name, torch.device("cpu"), torch.bfloat16)
        count = sum(param.numel() for param in model.parameters())
        assert count == Shape(name).params and params in (count, None)
    assert Shape("Qwen3-4B").params == 4_022_468_096
