"""A rank that is killed during a save is named by the others."""

import json

import pytest

from mp_optim import checkpoint
from support.launch import run_forked_program
from support.workers.gone import GONE, PATIENCE, TIMEOUT

OTHERS = [rank for rank in range(4) if rank != GONE]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gone")
    run_forked_program("-m", "support.workers.gone", str(folder), timeout=200)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in OTHERS]


@pytest.mark.parametrize("what", ["background", "first save", "load"])
def test_rank_that_is_gone_is_named_and_nobody_else(ranks, what):
    for found in ranks[1]:
        assert found[what]["said"].startswith("MissingRanksError: ")
        assert (
            f"failed: rank {GONE} of [0, 1, 2, 3] did not report within {PATIENCE:g} s"
            in found[what]["said"]
        )
        assert found[what]["seconds"] < 20


def test_groups_of_our_own_have_the_timeout_of_the_job(ranks):
    assert [found["timeout"] for found in ranks[1]] == [TIMEOUT.total_seconds()] * len(OTHERS)


def test_checkpoint_before_is_whole(ranks):
    assert [path.name for path in checkpoint.versions(ranks[0] / "saved")] == ["version-1"]
    checkpoint.verify(ranks[0] / "saved")
