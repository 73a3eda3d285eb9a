"""The command line and the files of tools/train.py."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from train import main

from mp_optim import OptimizerConfig, checkpoint
from support.functional import load_case
from support.launch import TOOLS, run_program_of_ranks
from training.config import TrainConfig
from training.loading import load_yaml, parse_command_line
from training.loop import train
from training.metrics import read_records

QUICKSTART = str(TOOLS / "configs" / "quickstart.yaml")


def test_trainer_config_prefers_flags_over_the_file_over_defaults():
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
    assert (config.optimizer.lr, config.optimizer.optimizer_offload_fraction) == (1e-3, 1.0)
    assert config.optimizer.params_dtype is torch.bfloat16 and config.run.resume
    assert config.optimizer.weight_decay == load_yaml(QUICKSTART).optimizer.weight_decay == 0.1
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
        ("run:\n  keep: 0", "run.keep=0: at least 1, or null for all"),
        ("optimizer: {lr: 1e-3\nrun: 1", "bad.yaml: line 2: not valid YAML: "),
        ("optimizer:\n\tlr: 1", "bad.yaml: line 2: not valid YAML: "),
        ("model:\n  num_kv_heads: 3", "num_heads=4: not a multiple of num_kv_heads=3"),
        ("model:\n  num_heads: 3", "hidden_size=128: not a multiple of num_heads=3"),
        ("model:\n  num_experts: 1", "num_experts_per_tok=2: there are num_experts=1"),
        ("model:\n  vocab_size: 100", "vocab_size=100: at least 256"),
    ],
)
def test_trainer_explains_an_invalid_config_file_in_one_line(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        parse_command_line(["--config", str(path)])
    assert re.search(message, str(stopped.value)) and "\n" not in str(stopped.value)


def test_trainer_shards_over_two_ranks_with_the_losses_of_one_process(tmp_path):
    """The first losses agree within 1e-6, and the second within 1 %. One process is refused."""
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
    flags += ["--run.layout", "zero2"]
    run_program_of_ranks(2, str(TOOLS / "train.py"), *flags, timeout=200)
    together = read_records(tmp_path / "run" / "metrics.jsonl")
    alone = train(
        dataclasses.replace(
            load_yaml(config), run=dataclasses.replace(load_yaml(config).run, save_interval=None)
        )
    )
    assert [record.loss for record in together] == pytest.approx(alone.losses, rel=1e-2)
    assert together[0].loss == pytest.approx(alone.losses[0], rel=1e-6)
    saved = checkpoint.versions(tmp_path / "run" / "checkpoints")
    assert [version.name for version in saved] == ["version-1"]
    with pytest.raises(
        ValueError, match=r"run\.layout='zero1' needs several processes: start this with torchrun"
    ):
        train(parse_command_line(["--config", str(config), "--run.layout", "zero1"]))


def test_trainer_writes_metrics_figures_and_a_checkpoint(tmp_path, capsys):
    config, _ = load_case("moe_bf16_offload_03")
    run = dataclasses.replace(
        config.run, steps=4, save_interval=4, eval_interval=2, output_dir=str(tmp_path)
    )
    result = main(
        dataclasses.replace(
            config,
            run=run,
            scheduler=dataclasses.replace(config.scheduler, lr_warmup_steps=0),
            optimizer=dataclasses.replace(config.optimizer, **HEALTH),
        ),
        Console(width=120),
    )
    printed = capsys.readouterr().out
    for expected in (
        "loss (nats/byte)",
        "tokens/s",
        "skipped steps",
        " k params",
        " ms",
        "optimizer on device",
        "optimizer on host",
    ):
        assert expected in printed
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and "eval_loss" in lines[1]
    assert [record.loss for record in read_records(tmp_path / "metrics.jsonl")] == result.losses
    for figure in ("loss.png", "health.png"):
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    last = lines[-1]["health"]
    assert last["skip_limit/grad_norm"] > lines[-1]["grad_norm"]
    assert sum(name.startswith("param_grad_norm/") for name in last) == 2
    assert result.checkpoint is not None


HEALTH = {
    "skip_step_sigma_factor": 1e3,
    "skip_step_rolling_interval_length": 4,
    "log_param_grad_norms": 2,
}
SMALL = """
model: {family: llama, hidden_size: 16, intermediate_size: 16, num_layers: 1, num_heads: 2}
data: {seq_length: 16, source: synthetic}
optimizer: {bf16: true, lr: 4.0e-3}
scheduler: {lr_decay_style: linear}
run: {global_batch_size: 2, micro_batch_size: 2, save_interval: 1}
"""


def small(folder: Path, *flags: str) -> TrainConfig:
    (folder / "small.yaml").write_text(SMALL, encoding="utf-8")
    file = ["--config", str(folder / "small.yaml"), "--run.output-dir", str(folder / "run")]
    return parse_command_line([*file, *flags])


def test_trainer_extends_a_run_and_keeps_the_newest_checkpoints(tmp_path, capsys):
    def rates() -> list[float]:
        return [record.lr for record in read_records(tmp_path / "run" / "metrics.jsonl")]

    console = Console(width=120)
    main(small(tmp_path, "--run.steps", "4"), console)
    first, folder = rates(), tmp_path / "run" / "checkpoints"
    kept = [version.name for version in checkpoint.versions(folder)]
    assert kept == ["version-2", "version-3", "version-4"]
    again = ["--resume", "--run.keep", "1"]
    main(small(tmp_path, "--run.steps", "4", *again), console)
    assert "all 4 steps were done: --run.steps N" in capsys.readouterr().out
    main(small(tmp_path, "--run.steps", "8", *again), console)
    assert "resuming at step 4 of 8" in capsys.readouterr().out
    assert rates()[:4] == first
    assert rates()[4:] == pytest.approx([4e-3 * (1 - step / 8) for step in range(4, 8)])
    assert [version.name for version in checkpoint.versions(folder)] == ["version-8"]
    with pytest.raises(
        SystemExit, match=r"schedule is not that of the run.*lr_decay_style='cosine'"
    ):
        main(small(tmp_path, *again, "--scheduler.lr-decay-style", "cosine"), console)
