"""A rank's share of its host, on hosts made of files, and on this one."""

from __future__ import annotations

import json
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_optim.host.host_share import parse_list, share_of
from support.fake_host import FakeHost
from support.launch import ROOT, run_forked_program, run_program_of_ranks, torchrun


@pytest.fixture
def host(tmp_path):
    made = FakeHost(tmp_path)
    made.build()
    return made


def shares(host, ranks, **seen):
    return [share_of(host.seen_by(rank, ranks, **seen), rank) for rank in range(ranks)]


def test_the_table_in_the_docs_is_what_eight_ranks_get(host):
    text = (ROOT / "docs" / "hosts.md").read_text()
    rows = re.findall(r"^\| (\d) \| (\d) \| (\d+) \| (\S+) \|$", text, re.MULTILINE)
    found = [
        (str(rank), str(share.node), str(share.threads), f"{share.cpus[0]}-{share.cpus[-1]}")
        for rank, share in enumerate(shares(host, 8))
    ]
    assert rows == found


def test_every_core_belongs_to_one_rank_and_hyperthreads_are_left_alone(host):
    mine = [cpu for share in shares(host, 8) for cpu in share.cpus]
    assert sorted(mine) == list(range(64))


def test_ranks_follow_their_accelerators_not_their_numbers(tmp_path):
    host = FakeHost(tmp_path, accelerators=(1, 0, 1, 0))
    host.build()
    assert [share.node for share in shares(host, 4)] == [1, 0, 1, 0]
    assert len({cpu for share in shares(host, 4) for cpu in share.cpus}) == 64


def test_a_rank_that_sees_only_its_own_accelerator(host):
    found = [share_of(host.seen_by(rank, 8, visible=[rank]), 0) for rank in range(8)]
    assert [share.node for share in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len({cpu for share in found for cpu in share.cpus}) == 64


@pytest.mark.parametrize("node", [-1, 7])
def test_where_the_host_does_not_know_the_node_ranks_are_spread(tmp_path, node):
    host = FakeHost(tmp_path, accelerators=[node] * 4)
    host.build()
    assert [share.node for share in shares(host, 4)] == [0, 0, 1, 1]
    alone = share_of(host.seen_by(), 0)
    assert alone.node is None and alone.threads == 64


def test_one_rank_without_accelerator_has_all_cores(host):
    share = share_of(host.seen_by(), None)
    assert (share.threads, share.node) == (64, None)
    assert share.reason == "64 cores"


def test_one_rank_stays_on_the_node_of_its_accelerator(host):
    share = share_of(host.seen_by(visible=[5]), 0)
    assert (share.threads, share.node) == (32, 1)


def test_what_a_launcher_bound_a_rank_to_is_its_own(host):
    bound = host.seen_by(3, 8, affinity=[*range(8, 14), *range(72, 78)])
    share = share_of(bound, 3)
    assert share.cpus == tuple(range(8, 14)) and share.reason.startswith("bound to 6")


def test_a_job_bound_as_a_whole_is_shared(host):
    job = range(16)
    found = shares(host, 4, affinity=job, of_parent=job)
    assert [share.cpus for share in found] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    ]


CGROUP = {
    "v2": {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "400000 100000"},
    "v2, above": {
        "proc/self/cgroup": "0::/job/step",
        "sys/fs/cgroup/job/cpu.max": "400000 100000",
        "sys/fs/cgroup/job/step/cpu.max": "max 100000",
    },
    "v1": {
        "proc/self/cgroup": "5:pids:/x\n3:cpu,cpuacct:/docker/1\n0::/",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    },
    "v1, named cpu": {
        "proc/self/cgroup": "3:cpu:/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    },
}


@pytest.mark.parametrize("version", CGROUP)
def test_a_quota_of_four_gives_four(host, version):
    for path, text in CGROUP[version].items():
        host.write(path, text)
    share = share_of(host.seen_by(), None)
    assert share.threads == 4 and "a CPU quota of 4 leaves 4" in share.reason
    assert [share.threads for share in shares(host, 8)] == [1] * 8


@pytest.mark.parametrize("text", ["max 100000", "-1 100000", "", "x y", "400000 0"])
def test_no_quota_is_none(host, text):
    host.write("proc/self/cgroup", "0::/")
    host.write("sys/fs/cgroup/cpu.max", text)
    assert share_of(host.seen_by(), None).threads == 64


def test_a_quota_of_less_than_a_core_gives_one(host):
    host.write("proc/self/cgroup", "0::/")
    host.write("sys/fs/cgroup/cpu.max", "50000 100000")
    assert share_of(host.seen_by(), None).threads == 1


def test_a_host_that_shows_nothing(tmp_path):
    host = FakeHost(tmp_path, cores=6, hyperthreads=1)
    assert [share.cpus for share in shares(host, 2)] == [(0, 1, 2), (3, 4, 5)]


@pytest.mark.parametrize("text", ["", "abc", "-3", "0", "1.5"])
def test_variables_that_are_no_numbers_of_ranks(host, text):
    seen = host.seen_by(LOCAL_WORLD_SIZE=text, LOCAL_RANK=text)
    assert share_of(seen, None).threads == 64


@given(
    cores=st.integers(1, 24),
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 30),
    accelerators=st.lists(st.integers(-1, 3), max_size=30),
    hyperthreads=st.integers(1, 2),
    dropped=st.sets(st.integers(0, 23)),
)
@settings(max_examples=60, deadline=None)
def test_any_host(tmp_path_factory, cores, nodes, ranks, accelerators, hyperthreads, dropped):
    """Nobody has none, and nobody has what the process may not use; cores are shared out without
    rest, and overlap only where there are too few."""
    made = FakeHost(
        tmp_path_factory.mktemp("host"), cores, min(nodes, cores), hyperthreads, accelerators
    )
    made.build()
    usable = set(range(cores * hyperthreads)) - dropped
    usable = usable or {0}
    found = shares(made, ranks, affinity=usable, of_parent=usable)
    for share in found:
        assert 1 <= share.threads == len(share.cpus) and set(share.cpus) <= usable
        assert re.search(r"\d+ cores|\d+ of \d+ cores", share.reason)
    if made.nodes == 1 and ranks <= len({cpu % cores for cpu in usable}):
        mine = [cpu for share in found for cpu in share.cpus]
        assert len(mine) == len(set(mine)) == len({cpu % cores for cpu in usable})


def test_kernel_lists():
    assert parse_list("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_list("") == []


PROGRAM = """
import os
import torch
from mp_optim import OptimizerConfig, get_megatron_optimizer
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(8, 8).bfloat16()
print(get_megatron_optimizer(OptimizerConfig(bf16=True, lr=1e-3), model).describe())
"""


TOLD = """
import json, os
words = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")
print(json.dumps({name: os.environ[name] for name in os.environ if name.endswith(words)}))
"""


def test_ranks_of_tests_are_told_what_torchrun_tells(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TOLD)
    by_torchrun = torchrun(2, str(program)).splitlines()
    by_the_tests = run_program_of_ranks(2, str(program)).splitlines()
    told, ours = (list(map(json.loads, lines)) for lines in (by_torchrun, by_the_tests))
    assert sorted(each["LOCAL_RANK"] for each in told) == ["0", "1"]
    for each in ours:
        (same,) = [other for other in told if other["RANK"] == each["RANK"]]
        assert each == {name: same.get(name) for name in each}


@pytest.mark.native
def test_ranks_say_their_share_of_this_host(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    cores = len(os.sched_getaffinity(0))
    text = run_program_of_ranks(2, str(program))
    each = max(1, cores // 2)
    threads = "1 thread" if each == 1 else f"{each} threads"
    assert text.count(f"host kernels: {threads}; {each} of {cores} cores") == 2
    alone = run_forked_program(str(program), OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="1")
    assert f"{cores} threads" in alone or cores == 1
