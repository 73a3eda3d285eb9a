"""Errors name the ranks with different settings or calls."""

import pytest
import torch

from mp_optim import OptimizerConfig
from mp_optim.mixed_precision.clip_and_skip import decide, decide_on_device
from mp_optim.mixed_precision.grad_norm import EXCLUDED, MAIN_NORM, Measurement
from support.launch import results_of_ranks
from support.workers.parts import OTHER_SETTINGS, OTHERWISE, RANKS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    return results_of_ranks("parts", RANKS, folder)


def test_layerwise_buffers_stay_small_when_one_matrix_dominates(ranks):
    """Both the parameter buffer and the gradient exchange are measured."""
    for rank in ranks:
        assert rank["buffer"] < 1.05
        assert max(rank["exchange"]) < 1.26


MESSAGES = {
    "zero_grad": "rank 1 has 'gradients of 2 backward passes reduced since zero_grad()'",
    "frozen": "rank 1 has '2.weight was frozen since the optimizer was built'",
    "count": "rank 1 has 'step 3' where rank 0 has 'step 2'",
    "clip_grad": "rank 1 has 'clip_grad=2.0' where rank 0 has 'clip_grad=1.0'; nothing was stepped",
    "log_num_zeros_in_grad": "rank 1 has 'log_num_zeros_in_grad=True' where",
    "log_param_grad_norms": "rank 1 has 'log_param_grad_norms=3' where",
    "nothing": "no error",
}


@pytest.mark.parametrize("what, strategy", OTHERWISE)
def test_sharded_step_names_the_rank_whose_settings_or_calls_differ(ranks, what, strategy):
    for rank in ranks:
        found = rank["otherwise"][what, strategy]
        assert MESSAGES[what] in found["told"] and found["kept"] == (what != "nothing")


def test_fsdp_step_names_the_rank_whose_settings_differ_and_steps_nothing(ranks):
    alike = "the ranks that share parameters disagree: rank 2 has"
    for rank in ranks:
        found = {what: run["told"] for what, run in rank["fsdp"].items()}
        assert found["nothing"] == found["path"] == ["no error"] * 3
        for how in ("lr", "lr, in parts"):
            assert found[how][::2] == ["no error"] * 2
            other = "'lr=0.5 of the group of 0.weight' where rank 0 has 'lr=0.01"
            assert f"{alike} {other}" in found[how][1]
        for name, value in OTHER_SETTINGS.items():
            for told in found[name]:
                assert f"{alike} '{name}={value}' where rank 0 has '{name}=" in told
                assert told.endswith("; nothing was stepped")
        for told in found["gradient"]:
            assert f"{alike} 'gradients of 3 parameters split alike'" in told
        assert max(run["seconds"] for run in rank["fsdp"].values()) < 4


@pytest.mark.parametrize("off, skips", [(0.0, False), (3.0, True)])
def test_device_verdict_skips_the_step_when_ranks_disagree(off, skips):
    """The device must skip before the host reads the verdict."""
    config = OptimizerConfig(clip_grad=1.0)
    sums = {name: torch.tensor(4.0, dtype=torch.float64) for name in (MAIN_NORM, EXCLUDED)}
    measured = Measurement(sums, None, torch.tensor(off, dtype=torch.float64))
    pending = decide_on_device(measured, (), config)
    verdict = decide(measured, (), config)
    assert pending.wait() == verdict
    assert verdict.cause == ("disagreement" if skips else "")
    assert bool(pending.multipliers[MAIN_NORM].values[1]) == skips
