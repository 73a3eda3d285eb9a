"""Each local rank gets an equal number of the host's cores."""

import json
import os

import pytest

from mp_optim.host.host_share import share_of
from support.fake_host import FakeHost
from support.launch import run_forked_program, run_program_of_ranks, torchrun


@pytest.fixture
def host(tmp_path):
    made = FakeHost(tmp_path)
    made.build()
    return made


@pytest.mark.parametrize(
    ("seen", "threads", "reason"),
    [
        ({}, 64, "64 cores"),
        ({"ranks": 8}, 8, "8 of 64 cores, which 8 local ranks share"),
        ({"ranks": 200}, 1, "1 of 64 cores, which 200 local ranks share"),
        ({"affinity": [0, 1, 64, 65]}, 2, "bound to 2 cores"),
        ({"affinity": [3, 67], "of_parent": [3, 67], "ranks": 2}, 1, "1 of 1 cores"),
        ({"LOCAL_WORLD_SIZE": "many"}, 64, "64 cores"),
    ],
)
def test_host_share_divides_cores_among_local_ranks(host, seen, threads, reason):
    share = share_of(host.seen_by(**seen))
    assert share.threads == threads and share.reason.startswith(reason)


@pytest.mark.parametrize("version", [1, 2])
def test_host_share_is_limited_by_the_cgroup_cpu_quota(host, version):
    if version == 1:
        host.write("proc/self/cgroup", "4:cpu,cpuacct:/docker/ab")
        host.write("sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us", "400000")
        host.write("sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us", "100000")
    else:
        host.write("proc/self/cgroup", "0::/kube/pod")
        host.write("sys/fs/cgroup/kube/cpu.max", "400000 100000")
    share = share_of(host.seen_by())
    assert (share.threads, share.reason) == (4, "64 cores, a CPU quota of 4 leaves 4 of them")
    assert share_of(host.seen_by(ranks=8)).threads == 1


PROGRAM = """
import os
import torch
from mp_optim import OptimizerConfig, get_megatron_optimizer
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(8, 8).bfloat16()
print(get_megatron_optimizer(OptimizerConfig(bf16=True, lr=1e-3), model).describe())
"""


WRITE_ENVIRONMENT = """
import json, os, pathlib, sys
words = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")
seen = {name: os.environ[name] for name in os.environ if name.endswith(words)}
pathlib.Path(sys.argv[1] + os.environ["RANK"]).write_text(json.dumps(seen))
"""


def test_run_program_of_ranks_sets_the_environment_of_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WRITE_ENVIRONMENT)
    torchrun(2, str(program), str(tmp_path / "torchrun"))
    run_program_of_ranks(2, str(program), str(tmp_path / "tests"))
    for rank in ("0", "1"):
        expected = json.loads((tmp_path / f"torchrun{rank}").read_text())
        seen = json.loads((tmp_path / f"tests{rank}").read_text())
        assert seen["LOCAL_RANK"] == rank
        assert seen == {name: expected.get(name) for name in seen}


@pytest.mark.native
def test_describe_prints_host_threads_of_each_rank(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    cores = len(os.sched_getaffinity(0))
    text = run_program_of_ranks(2, str(program))
    each = max(1, cores // 2)
    threads = "1 thread" if each == 1 else f"{each} threads"
    assert text.count(f"host kernels: {threads}; {each} of {cores} cores") == 2
    alone = run_forked_program(str(program), OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="1")
    assert f"{cores} threads" in alone or cores == 1
