"""tools/benchmark_disk.py with a small file."""

import benchmark_disk
import pytest
from benchmark_disk import Options

from support.kernels import needs_kernels


@needs_kernels
def test_benchmark_disk_compares_steps_with_dd(tmp_path, capsys):
    benchmark_disk.main(Options("speed", tmp_path, state=50, window=8, rounds=1))
    row = capsys.readouterr().out.splitlines()[2].split(" | ")
    assert all(float(value) > 0 for value in row[1:3])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_benchmark_disk_reports_equal_parameters_with_less_memory_than_the_state(
    tmp_path, capsys, mode
):
    options = Options("limit", tmp_path, state=150, window=4, memory=140, steps=3, mode=mode)
    benchmark_disk.main(options)
    limited, free, same = capsys.readouterr().out.splitlines()
    assert "limit none" in free and same == "the same parameters"
    assert int(limited.split("at most ")[1].split()[0]) < 120
    assert list(tmp_path.iterdir()) == []
