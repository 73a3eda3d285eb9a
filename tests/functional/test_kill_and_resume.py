"""A training process that is killed and resumed ends with the bits of an uninterrupted run."""

import dataclasses
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from support import launch
from support.functional import CASES, load_case
from training import checkpoints
from training.config import TrainConfig
from training.loop import Trainer, train
from training.metrics import read_records

STEPS = 16


def command(case: str, output: Path, *flags: str) -> list[str]:
    values = (
        (CASES / case / "model_config.yaml").read_text(encoding="utf-8").partition("\ntest:")[0]
    )
    config = output.with_suffix(".yaml")
    config.write_text(values, encoding="utf-8")
    return [
        str(launch.TOOLS / "train.py"),
        "--config",
        str(config),
        "--run.output-dir",
        str(output),
        "--run.steps",
        str(STEPS),
        "--run.save-interval",
        "1",
        *flags,
    ]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return launch.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def stop_after(
    steps: int, process: subprocess.Popen[str], output: Path, how: signal.Signals
) -> tuple[str, str]:
    deadline = time.monotonic() + 120
    while len(read_records(output / "metrics.jsonl")) < steps:
        assert process.poll() is None and time.monotonic() < deadline, (
            process.stderr and process.stderr.read()
        )
        time.sleep(0.005)
    process.send_signal(how)
    return process.communicate(timeout=120)


def config_of(case: str, output: Path) -> TrainConfig:
    config, _ = load_case(case)
    run = dataclasses.replace(config.run, steps=STEPS, save_interval=STEPS, output_dir=str(output))
    return dataclasses.replace(config, run=run)


def everything(case: str, output: Path) -> dict[str, torch.Tensor]:
    config = config_of(case, output)
    trainer = Trainer(dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True)))
    assert trainer.step == STEPS
    states = trainer.optimizer.state_dict()["state"]
    found = {
        f"{index}.{key}": value for index, state in states.items() for key, value in state.items()
    }
    return {**found, **{name: param.detach() for name, param in trainer.model.named_parameters()}}


@pytest.mark.parametrize(
    "case, how",
    [
        ("moe_bf16_offload_03", signal.SIGKILL),
        pytest.param("dense_fp16", signal.SIGINT, marks=pytest.mark.slow),  # Ctrl-C sends SIGINT.
        pytest.param("moe_fp32", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_training_gives_equal_bits_when_killed_and_resumed(case, how, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(command(case, killed))
    printed, errors = stop_after(STEPS // 2, process, killed, how)
    if how == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in errors
        last = printed.splitlines()[-1]
        assert re.search(r"interrupted after step \d+ of 16, saved to .*--resume", last)
    else:
        assert process.returncode == -how
    newest = checkpoints.latest(killed)
    assert newest is not None
    assert STEPS // 2 - 1 <= int(newest.name.removeprefix("version-")) < STEPS
    launch.run_forked_program(*command(case, killed, "--resume"), timeout=120)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = train(config_of(case, whole)).losses
    finally:
        torch.set_num_threads(threads)
    records = read_records(killed / "metrics.jsonl")
    assert [record.step for record in records] == list(range(STEPS))
    assert [record.loss for record in records] == expected
    ours, theirs = everything(case, killed), everything(case, whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
