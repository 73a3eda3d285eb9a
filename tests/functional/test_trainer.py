"""The trainer's command line and files."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from train import main

from mp_optim import OptimizerConfig
from support.functional import load_case
from support.launch import TOOLS, torchrun
from training.config import TrainConfig
from training.loading import load_yaml, parse_command_line
from training.loop import train
from training.metrics import read_records

CONFIGS = sorted((TOOLS / "configs").glob("*.yaml"))
QUICKSTART = str(TOOLS / "configs" / "quickstart.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    assert load_yaml(path).optimizer.lr


def test_flags_go_over_the_file_and_the_file_over_defaults() -> None:
    config = parse_command_line(
        [
            "--config",
            QUICKSTART,
            "--optimizer.lr",
            "1e-3",
            "--optimizer.params-dtype",
            "bfloat16",
            "--resume",
            "--optimizer.optimizer-offload-fraction",
            "1.0",
        ]
    )
    assert (config.optimizer.lr, config.optimizer.optimizer_offload_fraction) == (
        1e-3,
        1.0,
    )
    assert config.optimizer.params_dtype is torch.bfloat16 and config.run.resume
    assert (
        config.optimizer.weight_decay
        == load_yaml(QUICKSTART).optimizer.weight_decay
        == 0.1
    )
    assert config.optimizer.adam_beta1 == OptimizerConfig().adam_beta1
    assert parse_command_line([]) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer:\n  lrr: 1.0", "optimizer.lrr.*nearest field is 'optimizer.lr'"),
        ("optimiser:\n  lr: 1.0", "nearest field is 'optimizer'"),
        ("optimizer:\n  fp16: true\n  bf16: true", "fp16=True and bf16=True"),
        ("optimizer:\n  lr: fast", "lr"),
        ("run:\n  steps: 0", "run.steps=0"),
        ("run:\n  micro_batch_size: 3", "not a multiple"),
        ("- 1", "top level"),
        ("model:\n  family: gpt2", "model.family='gpt2': must be one of"),
        ("run:\n  steps: 2.5", "run.steps=2.5: must be a whole number"),
        ("run:\n  save_interval: 0", "run.save_interval=0"),
    ],
)
def test_a_bad_file_is_explained_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        parse_command_line(["--config", str(path)])
    assert re.search(message, str(stopped.value)) and "\n" not in str(stopped.value)


def test_ranks_train_together_and_have_to_say_how(tmp_path: Path) -> None:
    """Two processes share out the optimizer; the loss of the first step is that of one process."""
    config = tmp_path / "small.yaml"
    config.write_text(
        """
model:
  hidden_size: 16
  intermediate_size: 16
  num_layers: 1
  num_heads: 2
  num_kv_heads: 1
  num_experts: 2
data: {seq_length: 16, source: synthetic}
optimizer: {bf16: true, lr: 4.0e-3, optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5}
run: {steps: 2, global_batch_size: 8, micro_batch_size: 2, save_interval: 2}
""",
        encoding="utf-8",
    )
    flags = ["--config", str(config), "--run.output-dir", str(tmp_path / "run")]
    torchrun(2, str(TOOLS / "train.py"), *flags, "--run.layout", "zero2", timeout=200)
    together = read_records(tmp_path / "run" / "metrics.jsonl")
    alone = train(
        dataclasses.replace(
            load_yaml(config),
            run=dataclasses.replace(load_yaml(config).run, save_interval=None),
        )
    )
    assert [record.loss for record in together] == pytest.approx(alone.losses, rel=1e-2)
    assert together[0].loss == pytest.approx(alone.losses[0], rel=1e-6)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-00000002"
    with pytest.raises(
        ValueError,
        match=r"run\.layout='zero1' needs several processes: start this with torchrun",
    ):
        train(parse_command_line(["--config", str(config), "--run.layout", "zero1"]))


def test_a_run_leaves_what_it_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    config, _ = load_case("moe_bf16_offload_03")
    run = dataclasses.replace(
        config.run, steps=4, save_interval=4, eval_interval=2, output_dir=str(tmp_path)
    )
    result = main(
        dataclasses.replace(
            config,
            run=run,
            scheduler=dataclasses.replace(config.scheduler, lr_warmup_steps=0),
        ),
        Console(width=120),
    )
    printed = capsys.readouterr().out
    for expected in (
        "loss (nats/byte)",
        "tokens/s",
        "skipped steps",
        "optimizer on device",
        "optimizer on host",
    ):
        assert expected in printed
    lines = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and "eval_loss" in lines[1]
    assert [
        record.loss for record in read_records(tmp_path / "metrics.jsonl")
    ] == result.losses
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tensorboard").iterdir()) and result.checkpoint is not None
