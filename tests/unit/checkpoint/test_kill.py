"""The newest complete checkpoint always loads after kill -9 during a save."""

import os
import random
import signal
import subprocess
import time

import pytest

from mp_optim import checkpoint
from support.launch import start
from support.workers.kill import build, digest


class SavingProcesses:
    """A server process that forks one saving process for each line of its stdin."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.server = start("-m", "support.workers.kill", stdin=pipe, stdout=pipe)

    def kill_one(self, job: str, saves: int, moment: float) -> list[list[str]]:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(f"{job}\n")
        self.server.stdin.flush()
        said: list[list[str]] = []
        child, killed, begun, took = 0, False, 0.0, [0.0]
        for line in self.server.stdout:
            said.append(line.split())
            if said[-1] == ["gone"]:
                break
            if said[-1][0] == "begin":
                begun = time.monotonic()
            elif said[-1][0] == "end":
                took.append(time.monotonic() - begun)
            child = int(said[-1][1]) if said[-1][0] == "child" else child
            if child and not killed and sum(words[0] == "begin" for words in said) >= saves:
                time.sleep(moment * sorted(took)[len(took) // 2])
                os.kill(child, signal.SIGKILL)
                killed = True
        return said


@pytest.fixture(scope="module")
def processes():
    processes = SavingProcesses()
    yield processes
    processes.server.kill()
    processes.server.wait()


@pytest.mark.parametrize(
    ("kills", "mode", "keep"),
    [
        (5, "sync", 1),
        (5, "async", 2),
        pytest.param(50, "sync", 2, marks=pytest.mark.slow),
        pytest.param(50, "async", 1, marks=pytest.mark.slow),
    ],
)
def test_newest_complete_checkpoint_loads_after_kill_9_during_saves(
    processes, tmp_path, kills, mode, keep
):
    chance = random.Random(kills)
    digests: dict[int, str] = {}
    torn = last = 0
    for _ in range(kills):
        said = processes.kill_one(
            f"{tmp_path} {mode} {keep}", chance.randint(2, 3), chance.uniform(0.0, 1.2)
        )
        digests |= {int(words[1]): words[2] for words in said if words[0] == "begin"}
        begun = max(int(words[1]) for words in said if words[0] == "begin")
        complete = max([last, *(int(words[1]) for words in said if words[0] == "end")])
        torn += any(path.name.startswith(".version-") for path in tmp_path.iterdir())

        version = checkpoint.verify(tmp_path)
        versions = checkpoint.versions(tmp_path)
        model, optimizer = build()
        last = checkpoint.load(tmp_path, model, optimizer)["step"]
        assert complete <= last <= begun  # A save that returned is never lost.
        assert digest(model, optimizer) == digests[last]
        assert 1 <= len(versions) <= keep + 1
        # The last version may be complete without being published; all other versions are older.
        assert versions.index(version) >= len(versions) - 2
        for other in versions:
            checkpoint.verify(other)
    assert torn > kills // 8, "the kills missed the saves"
