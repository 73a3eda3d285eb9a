"""The surviving ranks name a rank that is killed during a save."""

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
def test_collective_names_only_the_rank_that_was_killed(ranks, what):
    for found in ranks[1]:
        assert found[what]["said"].startswith("MissingRanksError: ")
        assert (
            f"failed: rank {GONE} of [0, 1, 2, 3] did not report within {PATIENCE:g} s"
            in found[what]["said"]
        )
        assert found[what]["seconds"] < 20


def test_process_groups_of_checkpoint_have_timeout_of_the_job(ranks):
    assert [found["timeout"] for found in ranks[1]] == [TIMEOUT.total_seconds()] * len(OTHERS)


def test_last_checkpoint_is_complete_after_a_rank_was_killed_while_saving(ranks):
    assert [path.name for path in checkpoint.versions(ranks[0] / "saved")] == ["version-1"]
    checkpoint.verify(ranks[0] / "saved")
