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
        assert len(rank["with_policy"]) > 4 and all(rank["with_policy"])


@pytest.mark.parametrize("form", HANDS)
def test_dtensor_state_moved_by_hand_trains_with_equal_bits(ranks, form):
    assert [rank["hands"][form] for rank in ranks] == [[], []]


def test_state_of_dtensors_is_shown_on_the_host_when_offloaded(ranks):
    assert [rank["stays"] for rank in ranks] == [True, True]
