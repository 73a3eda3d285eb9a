"""Ranks that are gone are named within seconds, and nobody else: processes that are killed,
stopped, or just end."""

import json
import os
import subprocess

import pytest
import torch.distributed as dist

from mp_optim.ranks.missing_ranks import Address, exists, own_address
from support.launch import results_of_ranks, run_forked_program, start
from support.workers.missing_ranks import DISAGREE, RANKS, SCENARIOS, TIMEOUT

SECONDS = 10.0
pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or not dist.is_gloo_available(), reason="forks gloo ranks"
)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each rank that stayed was told, by scenario and rank."""
    folder = tmp_path_factory.mktemp("missing")
    run_forked_program("-m", "support.workers.missing_ranks", str(folder), "", timeout=280)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_ranks_that_are_gone_are_named_and_no_others(told, scenario):
    named = ", ".join(map(str, scenario.gone))
    for rank in (rank for rank in range(RANKS) if rank not in scenario.gone):
        found = told[f"{scenario.name}-{rank}"]
        assert found["told"].startswith("MissingRanksError: "), found
        if scenario.how == "stop" and scenario.gone == (0,):  # it keeps the store
            assert "perhaps rank 0, has ended or is stuck" in found["told"], found
            if rank == scenario.busy:
                assert "ranks 2, 3 ended, perhaps because of it" in found["told"], found
        else:
            how = "stuck or doing something else" if scenario.how == "stop" else "ended"
            word = "rank" if len(scenario.gone) == 1 else "ranks"
            assert (
                f"failed: {word} {named} of [0, 1, 2, 3] did not take part ({how})" in found["told"]
            ), found
        waits = TIMEOUT if scenario.how == "stop" else 0.0
        if scenario.how == "stop" and scenario.busy is not None:
            waits += 2.5  # it asks a store that does not answer once more
        assert found["seconds"] < SECONDS + waits, found


def test_ranks_that_differ_are_named_though_the_store_ends_with_the_first(told):
    for rank in range(RANKS):
        said = told[f"{DISAGREE.name}-{rank}"]["told"]
        assert said.startswith("ValueError: the ranks that share split parameters")
        assert "rank 1 has 'lr=0.01 of the group of 0.weight'" in said


def test_a_failure_is_forgotten_when_the_job_begins_again(tmp_path):
    """The store is the same, and so are all names; nobody is late by the new timeout."""
    for failed, again in results_of_ranks("lives", 2, tmp_path):
        assert failed.startswith("MissingRanksError: ")
        assert again == "no error"


def test_a_process_is_there_until_it_ends():
    program = (
        "from mp_optim.ranks.missing_ranks import own_address; import sys; "
        "print(own_address(None), flush=True); sys.stdin.read()"
    )
    with start("-c", program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        address = Address.parse(process.stdout.readline().strip())
        assert exists(address) is True
        process.kill()
        process.wait()
        assert exists(address) is False


def test_loopback_addresses_of_other_machines_say_nothing():
    mine = own_address(None)
    assert own_address(None) == mine and exists(mine) is True
    assert exists(Address(mine.host, mine.port, "another")) is None
