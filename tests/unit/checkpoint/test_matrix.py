"""Every layout's checkpoint loads into every layout, which then goes on as if nothing had
happened."""

import json

import pytest

from support.launch import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_layout_continues_every_other(tmp_path):
    run_ranks("matrix", 4, str(tmp_path), timeout=500)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert [rank["wrong"] for rank in found] == [{}] * 4
    assert found[0]["layouts"] >= 12 and found[0]["pairs"] == found[0]["layouts"] ** 2
