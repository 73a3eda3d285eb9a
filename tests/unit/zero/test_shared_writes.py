"""Errors name the ranks that write different values between steps."""

import pytest

from support.launch import results_of_ranks
from support.workers.writes import ALONE, CASES, ODD, RANKS

ROWS = "weight: Tensor of torch.float32, shape (12,), torch.strided, checksum"
MESSAGES = {
    "factors": f"rank 1 has '{ROWS}",
    "one factor": f"rank 1 has '{ROWS}",
    "name": f"rank 1 has 'nothing' where rank 0 has '{ROWS}",
    "unknown": "rank 1 has 'wieght: Tensor of torch.float32, shape (12,),",
    "values": "rank 1 has 'weight: Tensor of torch.float32, shape (12, 8),",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of_ranks("writes", RANKS, tmp_path_factory.mktemp("writes"))


@pytest.mark.parametrize("layout, what", CASES)
def test_scale_rows_names_the_rank_with_other_factors_and_changes_nothing(ranks, layout, what):
    runs = [rank[f"{layout} {what}"] for rank in ranks]
    for run in runs:
        if what == "nothing":
            assert run["told"] == "no error"
            assert run["after"] != run["before"]
        else:
            assert MESSAGES[what] in run["told"], run
            assert run["told"].endswith("; nothing was changed")
            assert run["after"] == run["before"]
        assert run["stepped"] == runs[0]["stepped"] != run["after"]


@pytest.mark.parametrize("what", ALONE)
def test_scale_rows_and_averaged_weights_name_the_rank_that_calls_alone(ranks, what):
    for rank in ranks:
        assert f"rank {ODD} was {ALONE[what]}" in rank[what]
        assert "each of ranks 0, 2 was reducing the gradients" in rank[what]
        assert "call step(), backward() and zero_grad() equally often" in rank[what]
        # A rank that calls alone must not repeat the agreement.
        assert "(and again)" not in rank[what]
