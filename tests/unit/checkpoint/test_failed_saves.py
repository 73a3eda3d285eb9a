"""A save that fails on some ranks raises on all ranks, and the next save works."""

import pytest

from mp_optim import checkpoint
from support.launch import results_of_ranks
from support.workers.failed_saves import RANKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("failed")


@pytest.fixture(scope="module")
def ranks(folder):
    return results_of_ranks("failed_saves", RANKS, folder)


def test_save_names_every_rank_that_failed(ranks):
    assert [rank["two fail"].count("No space left on disk") for rank in ranks] == [2, 1, 1]
    assert "rank 1: " in ranks[0]["two fail"] and "rank 2: " in ranks[0]["two fail"]
    for rank in (1, 2):
        assert f"disk {rank}" in ranks[rank]["two fail"]


def test_ranks_save_again_after_a_late_rank_failed_a_save(ranks, folder):
    """The next save uses a new process group, because the failed group is closed."""
    for rank in ranks:
        assert rank["one is late"].startswith("MissingRanksError: ")
        assert rank["again"] == "no error"
    checkpoint.verify(folder / "saved")


def test_background_saves_of_two_optimizers_do_not_wait_for_each_other(ranks, folder):
    for rank in ranks:
        assert rank["side by side"] == ["version-1", False, "version-1"]
    checkpoint.verify(folder / "first")
