"""Errors name exactly the missing ranks: killed, stopped or ended processes."""

import json
import os

import pytest
import torch.distributed as dist

from mp_optim.process_groups.missing_ranks import naming_missing_ranks
from support.launch import results_of_ranks, run_forked_program
from support.one_rank import one_rank
from support.workers.missing_ranks import DISAGREE, PATIENCE, RANKS, SCENARIOS, TIMEOUT

SECONDS = 10.0
pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or not dist.is_gloo_available(), reason="forks gloo ranks"
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("missing")
    run_forked_program("-m", "support.workers.missing_ranks", str(folder), "", timeout=280)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_missing_ranks_error_names_exactly_the_silent_ranks(outcomes, scenario):
    named = ", ".join(map(str, scenario.gone))
    word = "rank" if len(scenario.gone) == 1 else "ranks"
    expected = f"failed: {word} {named} of [0, 1, 2, 3] did not report within {PATIENCE:g} s"
    if scenario.gone == (0,):  # Rank 0 keeps the store.
        expected = "the process that keeps the store, perhaps rank 0, has ended or is stuck"
    for rank in (rank for rank in range(RANKS) if rank not in scenario.gone):
        found = outcomes[f"{scenario.name}-{rank}"]
        assert found["told"].startswith("MissingRanksError: "), found
        assert expected in found["told"], found
        waits = TIMEOUT if scenario.how == "stop" else 0.0
        assert found["seconds"] < SECONDS + PATIENCE + waits, found


def test_naming_missing_ranks_keeps_an_error_when_no_collective_raised_it():
    with one_rank():
        with (
            pytest.raises(RuntimeError, match="Connection timed out") as raised,
            naming_missing_ranks(dist.group.WORLD)("reducing"),
        ):
            raise RuntimeError("Connection timed out: NCCL, gloo")
        assert raised.type is RuntimeError


def test_optimizer_opens_no_port_when_a_process_group_is_initialized():
    printed = run_forked_program("-c", _PROGRAM)
    before, after = printed.splitlines()[-2:]
    assert before == after


_PROGRAM = """
import os, torch, torch.distributed as dist, mp_optim
def listening():
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    sockets = {os.readlink(file) for file in files if os.path.lexists(file)}
    lines = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{kind}")]
    return sorted(line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(listening())
model = torch.nn.Linear(4, 4)
config = mp_optim.OptimizerConfig(lr=1e-3, use_distributed_optimizer=True)
optimizer = mp_optim.get_megatron_optimizer(config, model)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(listening())
"""


def test_every_rank_names_the_rank_with_another_lr_when_rank_0_ends_first(outcomes):
    for rank in range(RANKS):
        error = outcomes[f"{DISAGREE.name}-{rank}"]["told"]
        assert error.startswith("ValueError: the ranks that share parameters")
        assert "rank 1 has 'lr=0.01 of the group of 0.weight'" in error


def test_missing_ranks_error_does_not_recur_when_the_job_restarts(tmp_path):
    for failed, again in results_of_ranks("lives", 2, tmp_path):
        assert failed.startswith("MissingRanksError: ")
        assert again == "no error"
