"""tools/benchmark_disk.py on a small file."""

import benchmark_disk
from benchmark_disk import Options


def test_every_pattern_is_compared_and_nothing_is_left(tmp_path, capsys):
    benchmark_disk.main(Options(tmp_path, size=32, window=8, rounds=1, threads=2))
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("DirectFile(")
    rows = [line.split(" | ") for line in said if line.count("|") == 5][2:]
    assert [row[0] for row in rows] == ["| read", "| write", "| read and write"]
    assert all(float(row[column]) > 0 for row in rows for column in (1, 2))
    assert list(tmp_path.iterdir()) == []
