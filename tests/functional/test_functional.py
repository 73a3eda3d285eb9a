"""Every training case follows its golden values."""

import functools
from pathlib import Path

import pytest

from support.functional import (
    Curve,
    case_names,
    differences,
    load_case,
    load_golden,
    precision_of,
    run_case,
)
from support.regenerate import finite


@functools.cache
def uninterrupted(name: str) -> Curve:
    return finite(run_case(name, Path()))


@pytest.mark.parametrize("name", case_names())
def test_training_case_follows_its_golden_values(name, tmp_path):
    config, options = load_case(name)
    curve = finite(run_case(name, tmp_path)) if options.same_as else uninterrupted(name)
    if options.same_as is not None:
        assert curve == uninterrupted(options.same_as), f"not bit-identical with {options.same_as}"
    assert not differences(curve, load_golden(name), precision_of(config))


def test_moe_training_case_reduces_its_loss():
    losses = uninterrupted("moe_bf16").losses
    assert losses[-1] < losses[0] - 1.0


def test_fp16_training_case_skips_overflows_and_then_recovers():
    curve = uninterrupted("moe_fp16_forced_overflow")
    first_good = curve.skipped.index(False)
    assert first_good > 0
    assert not any(curve.skipped[first_good:])
    assert curve.loss_scales[first_good] < curve.loss_scales[0]
    assert curve.losses[-1] < curve.losses[first_good] - 0.5


def test_golden_values_have_no_skipped_steps_in_overflow_free_cases():
    for name in case_names():
        if "overflow" not in name:
            assert not any(load_golden(name).skipped), name


def test_gradient_accumulation_case_follows_the_whole_batch_loss():
    whole, parts = uninterrupted("moe_bf16"), uninterrupted("gradient_accumulation")
    assert abs(whole.losses[0] - parts.losses[0]) < 1e-3
    assert abs(whole.losses[-1] - parts.losses[-1]) < 0.1


def test_golden_comparison_reports_one_wrong_loss():
    golden = load_golden("moe_bf16")
    wrong = Curve(
        [*golden.losses[:-1], golden.losses[-1] + 0.05],
        golden.grad_norms,
        golden.skipped,
        golden.loss_scales,
    )
    assert len(differences(wrong, golden, "bf16")) == 1
