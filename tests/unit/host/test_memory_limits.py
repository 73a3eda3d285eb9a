"""Limits of host memory, read from the files of a fake host."""

import pytest

from mp_optim.host.memory_limits import memory_limits
from support.fake_host import FakeHost

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def host(tmp_path):
    return FakeHost(tmp_path)


def free(host, ranks=1):
    return {limit.name: limit.free for limit in memory_limits(host.seen_by(0, ranks))}


def write_v2(host, folder, limit, used, stat="anon 0", high="max"):
    for name, value in (("max", limit), ("high", high), ("current", used), ("stat", stat)):
        host.write(f"sys/fs/cgroup{folder}/memory.{name}", str(value))


def write_ranks(host, resident):
    host.write("proc/1/task/1/children", " ".join(str(10 + rank) for rank in range(len(resident))))
    for rank, size in enumerate(resident):
        text = f"Pid:\t{10 + rank}\nPPid:\t1\nRssAnon:\t{size // 1024} kB\nRssShmem:\t0 kB"
        host.write(f"proc/{10 + rank}/status", text)
        if rank == 0:
            host.write("proc/self/status", text)


def test_memory_limits_are_empty_when_system_files_are_missing(host):
    assert memory_limits(host.seen_by()) == []


def test_memory_limits_include_parent_cgroups_of_version_2(host):
    host.write("proc/self/cgroup", "0::/kube/pod")
    write_v2(host, "/kube/pod", "max", GIB)
    write_v2(host, "/kube", 10 * GIB, 7 * GIB, high=9 * GIB)
    write_v2(host, "", 64 * GIB, 20 * GIB)
    assert free(host) == {
        "memory.max of /sys/fs/cgroup/kube": 3 * GIB,
        "memory.high of /sys/fs/cgroup/kube": 2 * GIB,
        "memory.max of /sys/fs/cgroup": 44 * GIB,
    }


def test_memory_limits_count_page_cache_as_free_but_not_shared_memory(host):
    host.write("proc/self/cgroup", "0::/")
    stat = f"anon {GIB}\nfile {5 * GIB}\nshmem {GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}"
    write_v2(host, "", 8 * GIB, 7 * GIB, f"{stat}\nslab_reclaimable {GIB // 2}")
    assert free(host) == {"memory.max of /sys/fs/cgroup": 8 * GIB - 7 * GIB + 4 * GIB + GIB // 2}


def test_memory_limits_read_cgroup_version_1_mounted_at_the_container_root(host):
    host.write("proc/self/cgroup", "4:cpu,memory:/docker/ab\n3:cpuset:/\n0::/")
    # A container sees its own cgroup as the root, so docker/ab is absent.
    top = "sys/fs/cgroup/memory"
    host.write(f"{top}/memory.limit_in_bytes", str(4 * GIB))
    host.write(f"{top}/memory.usage_in_bytes", str(3 * GIB))
    host.write(f"{top}/memory.stat", f"cache 9\ntotal_inactive_file {GIB}\ntotal_active_file 0")
    assert free(host) == {"memory.limit_in_bytes of /sys/fs/cgroup/memory": 2 * GIB}
    host.write(f"{top}/memory.limit_in_bytes", str(UNLIMITED_V1))
    assert free(host) == {}


def test_memory_limits_exclude_swap_when_swap_is_free(host):
    host.write("proc/meminfo", "MemTotal: 8192 kB\nMemAvailable: 4096 kB\nSwapFree: 999999 kB")
    assert free(host) == {"MemAvailable": 4096 * 1024}


def test_memory_limits_include_the_process_data_limit(host):
    host.write("proc/self/status", "Name: python\nVmSize: 1024 kB\nVmData: 512 kB")
    host.write(
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max data size             2097152              unlimited            bytes     \n"
        "Max address space         unlimited            unlimited            bytes     \n"
        "Max locked memory         65536                65536                bytes     ",
    )
    assert free(host) == {"RLIMIT_DATA (ulimit -d)": 2097152 - 512 * 1024}


@pytest.mark.parametrize("taken", [0, 20])
def test_memory_limits_give_equal_shares_when_other_ranks_allocated_first(host, taken):
    """Three other ranks may have allocated 20 GiB each before this rank checks."""
    left = 100 - 4 - 3 * taken  # Each of the 4 processes held 1 GiB at first.
    host.write("proc/meminfo", f"MemTotal: {100 << 20} kB\nMemAvailable: {left << 20} kB")
    write_ranks(host, [GIB, *[(1 + taken) * GIB] * 3])
    assert free(host, 4) == {"MemAvailable, which 4 ranks share": 24 * GIB}


def test_memory_limits_give_a_rank_its_share_of_the_total_when_other_ranks_are_unknown(host):
    host.write("proc/meminfo", f"MemTotal: {100 << 20} kB\nMemAvailable: {90 << 20} kB")
    assert free(host, 4) == {"MemAvailable, which 4 ranks share": 25 * GIB}
    host.write("proc/meminfo", f"MemTotal: {100 << 20} kB\nMemAvailable: {9 << 20} kB")
    assert free(host, 4) == {"MemAvailable, which 4 ranks share": 9 * GIB}
