"""Offload transfers 16-bit values, and checkpoints take only plain data besides tensors."""

import itertools

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from mp_optim import checkpoint
from support.models import AdversarialTransfer, build, train
from support.offload import hybrids


def test_save_refuses_extra_objects_that_are_not_plain_data(tmp_path):
    model, optimizer = build("bf16")
    checkpoint.save(tmp_path, model, optimizer, extra={"step": 1})
    with pytest.raises(ValueError, match="numbers, strings, tensors"):
        checkpoint.save(tmp_path, model, optimizer, extra={"where": tmp_path})
    with (
        torch.serialization.safe_globals(
            [type(tmp_path)]
        ),  # This type is trusted here, but perhaps not where the checkpoint is loaded.
        pytest.raises(ValueError, match="numbers, strings, tensors"),
    ):
        checkpoint.save(tmp_path, model, optimizer, extra={"where": tmp_path})
    assert checkpoint.load(tmp_path, *build("bf16")) == {"step": 1}


def test_checkpoint_load_refuses_a_scheduler_when_none_was_saved(tmp_path):
    model, optimizer = build("bf16")
    checkpoint.save(tmp_path, model, optimizer)
    with pytest.raises(ValueError, match="no scheduler state"):
        checkpoint.load(tmp_path, model, optimizer, StepLR(optimizer, 1))


def test_offload_transfers_only_16_bit_values_for_bf16_params():
    model, optimizer = build("bf16", 1.0)
    for hybrid in hybrids(optimizer):
        hybrid.stepper.use_transfer(AdversarialTransfer())
    train(model, optimizer, 1)
    trainable = sum(p.nbytes for p in model.parameters())
    assert optimizer.metrics()["bytes_down"] == trainable
    assert optimizer.metrics()["bytes_up"] == trainable


def test_offloaded_main_params_are_allocated_together_on_the_host():
    _, optimizer = build("bf16", 1.0)
    for hybrid in hybrids(optimizer):
        mains = sorted(
            (p for g in hybrid.param_groups for p in g["params"]), key=torch.Tensor.data_ptr
        )
        assert all(main.dtype == torch.float32 for main in mains)
        # Main params are adjacent in one allocation, aligned to 64 bytes.
        for before, after in itertools.pairwise(mains):
            assert after.data_ptr() == before.data_ptr() + -(-before.nbytes // 64) * 64
