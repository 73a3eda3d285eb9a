"""DTensor parameters (Megatron-LM #4623) with FSDP2 on a gloo mesh of two processes."""

import pytest

from support.launch import results_of_ranks
from support.workers.fsdp import HANDS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    return results_of_ranks("fsdp", 2, folder)


def test_fsdp2_cpu_offload_policy_changes_no_bit(ranks):
    for rank in ranks:
        assert len(rank["beside_fsdps"]) > 4 and all(rank["beside_fsdps"])


def test_fsdp2_ranks_agree_on_grad_norm_and_skipped_steps(ranks):
    for rank in ranks:
        # The squares of 2, 3 and the duplicate's 6 count once.
        assert rank["agreement"] == {"norm": pytest.approx(7.0, rel=1e-12), "skipped": True}


def test_fsdp2_rank_without_experts_steps_with_the_common_norm(ranks):
    assert [rank["experts"] for rank in ranks] == [
        {"norm": 5.0, "stubs": [False, True]},
        {"norm": 5.0, "stubs": [True, False]},
    ]


@pytest.mark.parametrize("form", HANDS)
def test_dtensor_state_moved_by_hand_trains_with_equal_bits(ranks, form):
    assert [rank["hands"][form] for rank in ranks] == [[], []]


def test_state_of_dtensors_is_shown_on_the_host_when_offloaded(ranks):
    assert [rank["stays"] for rank in ranks] == [True, True]
