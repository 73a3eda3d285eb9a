"""tools/benchmark_disk.py on a small file."""

import benchmark_disk
import benchmark_disk_step
import pytest
from benchmark_disk import Options

from support.kernels import needs_kernels


def test_every_pattern_is_compared_and_nothing_is_left(tmp_path, capsys):
    benchmark_disk.main(Options(tmp_path, size=32, window=8, rounds=1, threads=2))
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("DirectFile(")
    rows = [line.split(" | ") for line in said if line.count("|") == 5][2:]
    assert [row[0] for row in rows] == ["| read", "| write", "| read and write"]
    assert all(float(row[column]) > 0 for row in rows for column in (1, 2))
    assert list(tmp_path.iterdir()) == []


@needs_kernels
def test_steps_are_compared_with_dd(tmp_path, capsys):
    options = {"folder": tmp_path, "state": 50, "window": 8}
    benchmark_disk_step.main(benchmark_disk_step.Options("speed", rounds=1, **options))
    row = capsys.readouterr().out.splitlines()[2].split(" | ")
    assert all(float(value) > 0 for value in row[1:3])
    assert list(tmp_path.iterdir()) == []


@needs_kernels
def test_what_backward_hides_is_shown_for_each_mode(tmp_path, capsys):
    options = {"folder": tmp_path, "state": 50, "window": 8}
    benchmark_disk_step.main(benchmark_disk_step.Options("hidden", rounds=1, **options))
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| sync", "| overlap", "| speculative"]
    assert all(float(row[1]) > 0 for row in rows)
    early = [int(row[3].split("%")[0]) for row in rows]
    assert early[0] == 0 and max(early) <= 100
    assert list(tmp_path.iterdir()) == []


@needs_kernels
@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "overlap"])
def test_a_run_under_a_limit_has_the_parameters_of_one_in_memory(tmp_path, capsys, mode):
    """The state is larger than the limit."""
    options = {"folder": tmp_path, "state": 150, "window": 4, "memory": 120, "steps": 3}
    options["mode"] = mode
    benchmark_disk_step.main(benchmark_disk_step.Options("limit", **options))
    limited, free, same = capsys.readouterr().out.splitlines()
    assert "at most" in limited and "limit none" in free and same == "the same parameters"
    assert int(limited.split("at most ")[1].split()[0]) < 120
    shown = "of the disk's bytes moved during backward"
    assert shown in limited and shown not in free
