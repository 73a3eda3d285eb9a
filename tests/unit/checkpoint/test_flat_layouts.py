"""Flat ranges through stock torch.distributed.checkpoint: to and from every other layout, on 1 to 4
ranks."""

import json

from support.launch import run_ranks


def test_every_layout_loads_into_every_other(tmp_path):
    run_ranks("flat", 4, str(tmp_path))
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert [rank["wrong"] for rank in found] == [[]] * 4
    assert [rank["cases"] for rank in found] == [144, 120, 72, 36]
