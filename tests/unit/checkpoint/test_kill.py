"""The newest complete checkpoint always loads after kill -9 during a save."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mp_optim import checkpoint
from support.launch import start
from support.workers.kill import build, digest


class SavingProcesses:
    """A server process that forks one saving process for each line of its stdin."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.server = start("-m", "support.workers.kill", stdin=pipe, stdout=pipe)

    def kill_one(
        self, root: Path, options: str, chance: random.Random, aimed: bool
    ) -> list[list[str]]:
        """Kill a process at a random moment of its second or third save, or of a later save.

        On a loaded machine a save can end before a random moment. So an aimed kill stops the
        process at random moments until the folder has an unfinished version.

        Returns:
            the lines that the process printed, split into words.
        """
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(f"{root} {options}\n")
        self.server.stdin.flush()
        said: list[list[str]] = []
        child, killed, begun, took = 0, False, 0.0, [0.0]
        saves = chance.randint(2, 3)
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
                usual = sorted(took)[len(took) // 2]
                time.sleep(chance.uniform(0.0, 1.2) * usual)
                os.kill(child, signal.SIGSTOP)
                while aimed and not has_unfinished(root):
                    os.kill(child, signal.SIGCONT)
                    time.sleep(chance.uniform(0.0, 1.2) * usual)
                    os.kill(child, signal.SIGSTOP)
                os.kill(child, signal.SIGKILL)
                killed = True
        return said


def has_unfinished(root: Path) -> bool:
    return any(path.name.startswith(".version-") for path in root.iterdir())


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
    for number in range(kills):
        said = processes.kill_one(tmp_path, f"{mode} {keep}", chance, aimed=number % 2 == 0)
        digests |= {int(words[1]): words[2] for words in said if words[0] == "begin"}
        begun = max(int(words[1]) for words in said if words[0] == "begin")
        complete = max([last, *(int(words[1]) for words in said if words[0] == "end")])
        torn += has_unfinished(tmp_path)

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
