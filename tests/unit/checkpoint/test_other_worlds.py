"""What some ranks of FSDP2 saved loads on any other number of them, with the same bits where no
value is lost, and else not without being asked."""

import json

from support.launch import run_ranks


def test_from_two_ranks_to_one_and_three(tmp_path):
    run_ranks("other_worlds", 3, str(tmp_path), timeout=150)
    found = {}
    for rank in range(3):
        for name, value in json.loads((tmp_path / f"rank{rank}.json").read_text()).items():
            found.setdefault(name, []).append(value)
    assert len(found) == 16
    for name, values in found.items():
        if name.partition(",")[0] in ("8 bits", "4 bits") and "rows" not in name:
            for value in values:
                assert "cannot hold without loss" in value, name
                assert "Codes share a scale in every 256 elements" in value, name
        else:
            assert values == [True] * len(values), name
