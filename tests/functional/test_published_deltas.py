"""A trainer and a generator keep equal weights by deltas alone, although steps are skipped and each
process is killed once."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support import launch

PROGRAM = str(launch.TOOLS / "examples" / "rl_deltas.py")


def start(role: str, folder: Path, *rest: str) -> subprocess.Popen[str]:
    return launch.start(PROGRAM, role, str(folder), *rest, stdout=subprocess.PIPE)


def kill_after(count: int, process: subprocess.Popen[str], run: Path) -> None:
    deadline = time.monotonic() + 180
    while len(list(run.glob("*.json"))) < count:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def result(process: subprocess.Popen[str]) -> dict[str, float]:
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    found: dict[str, float] = json.loads(printed)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("codes", [[], ["--codes"]], ids=["weights", "codes"])
@pytest.mark.parametrize(
    "steps", [pytest.param(120), pytest.param(500, marks=pytest.mark.slow)], ids=str
)
def test_deltas_keep_generator_weights_equal_to_the_trainer_when_a_process_is_killed(
    tmp_path, steps, codes
):
    trainer = start("train", tmp_path, "--steps", str(steps), *codes)
    generator = start("generate", tmp_path, *codes)
    try:
        kill_after(30, generator, tmp_path / "run-000")
        generator = start("generate", tmp_path, *codes)
        kill_after(70, trainer, tmp_path / "run-000")
        trainer = start("train", tmp_path, "--steps", str(steps), *codes)
        counts = result(trainer)
        taken = result(generator)["taken"]
    finally:
        trainer.kill()
        generator.kill()
    # The trainer resumed from the checkpoint at step 50 and compared every publication.
    assert counts["compared"] == steps - 50
    assert counts["skipped"] > 0
    assert counts["reward"] > 0.5
    assert taken >= steps - 50
