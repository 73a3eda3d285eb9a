"""Hyperparameters of ``TrainingArguments`` reach the optimizer that the Trainer builds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mp_optim
from mp_optim.apps.integrations.trainer_args import class_and_settings, log_own_norm
from mp_optim.optimizers import classes


@pytest.mark.parametrize("name", classes.__all__)
def test_trainer_args_pass_lr_betas_eps_and_decay_to_each_class(name, tmp_path):
    arguments = TrainingArguments(
        str(tmp_path),
        learning_rate=1.25e-5,
        adam_beta1=0.8,
        adam_beta2=0.9,
        adam_epsilon=1e-6,
        weight_decay=0.3,
        report_to=[],
        use_cpu=True,
    )
    chosen = {"optimizer": name, "offload": 1.0}
    trainer = Trainer(
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16(),
        arguments,
        optimizer_cls_and_kwargs=class_and_settings(arguments, chosen),
    )
    optimizer = trainer.create_optimizer()
    assert type(optimizer).__name__ == name
    assert {group["lr"] for group in optimizer.param_groups} == {1.25e-5}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.3}
    if name in ("Adam", "AdamW", "LAMB", "Muon"):
        given = {(group["betas"], group["eps"]) for group in optimizer.param_groups}
        assert given == {((0.8, 0.9), 1e-6)}


def test_class_and_settings_prefer_chosen_values_over_trainer_args(tmp_path):
    arguments = TrainingArguments(str(tmp_path), learning_rate=1e-5, use_cpu=True)
    cls, settings = class_and_settings(arguments, {"lr": 3e-4})
    assert cls is mp_optim.AdamW and settings["lr"] == 3e-4
    with pytest.raises(ValueError, match="optimizer='adamw_8bit': must be one of"):
        class_and_settings(arguments, {"optimizer": "adamw_8bit"})


def norms_of_run(folder: Path, **chosen: Any) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    ).bfloat16()
    row = torch.arange(16) % 8
    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        logging_steps=1,
        max_grad_norm=0.0,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row + n, "labels": row + n} for n in range(16)],
        optimizer_cls_and_kwargs=class_and_settings(arguments, {"offload": 1.0, **chosen}),
    )
    log_own_norm(trainer)
    trainer.train()
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize("mode", ["overlap", "speculative"])
def test_trainer_logs_the_grad_norm_when_gradients_were_released(mode, tmp_path):
    kept = norms_of_run(tmp_path / "kept")
    released = norms_of_run(tmp_path / "released", offload_mode=mode, release_gradients=True)
    # torch rounds the norm of kept gradients to bfloat16.
    assert released == pytest.approx(kept, rel=1e-2) and min(kept) > 0
    clipped = norms_of_run(tmp_path / "clipped", max_grad_norm=0.1)
    assert clipped[0] == kept[0]  # The Trainer's own norm is logged when no gradient was released.
