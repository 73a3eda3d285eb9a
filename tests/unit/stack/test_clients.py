"""Other libraries drive the optimizer: torch schedulers, DCP and the HF Trainer."""

import pytest
import torch

from support.models import same_bits


def hf_training(folder, max_grad_norm, mode):
    from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

    from mp_optim import OptimizerConfig, get_megatron_optimizer

    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=2,
            max_position_embeddings=32,
        )
    ).bfloat16()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2,
            bf16=True,
            clip_grad=0.0,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=0.5,
            offload_mode=mode,
        ),
        model,
    )
    row = torch.arange(16) % 8
    arguments = TrainingArguments(
        folder,
        max_steps=12,
        max_grad_norm=max_grad_norm,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_steps=6,
        logging_steps=4,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row}] * 24,
        optimizers=(optimizer, None),
    )
    trainer.train()
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    return model, optimizer, losses


@pytest.mark.parametrize("limit", [0.0, 1e3, 0.5])
def test_backward_work_is_kept_when_hf_trainer_only_measures_the_norm(tmp_path, limit):
    """The Trainer calls ``clip_grad_norm_`` with a limit of inf for ``max_grad_norm=0``, to log the
    norm."""
    expected, _, expected_losses = hf_training(tmp_path / "sync", limit, "sync")
    model, optimizer, losses = hf_training(tmp_path / "early", limit, "speculative")
    assert losses == expected_losses and losses[-1] < losses[0]
    assert (tmp_path / "sync" / "checkpoint-6" / "optimizer.pt").is_file()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert same_bits(param.detach(), other.detach())
    metrics = optimizer.metrics()
    if limit == 0.5:  # Only this limit clips.
        assert metrics["stale_buckets"] > 0
    else:
        # One or two buckets hit in each of 12 steps.
        assert metrics["speculation_hits"] in (12, 24)
        assert metrics["stale_buckets"] == metrics["speculation_redone"] == 0
