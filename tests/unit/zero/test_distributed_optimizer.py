"""DistributedOptimizer on up to four gloo processes."""

import math

import pytest
import torch

from support.launch import run_ranks
from support.workers.distributed import BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    run_ranks("distributed", 4, str(folder), timeout=280)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(4)]


def test_ranks_agree_on_the_largest_offload_fraction_or_name_the_reason(ranks):
    (fraction, text), *others = (rank["fraction"] for rank in ranks)
    assert 0.0 < fraction < 1.0 and text.startswith("gpu_memory=1000: ")
    assert all(same == fraction and said.endswith(text) for same, said in others)


def test_distributed_optimizer_starts_from_the_parameters_of_the_first_rank(ranks):
    assert [rank["start"] for rank in ranks] == ["[[1.0], [2.0]]"] * 4


def test_reduction_adds_gradients_in_fp32_in_rank_order(ranks):
    assert all(len(rank["sums"]) == 5 and all(rank["sums"].values()) for rank in ranks)


def test_sharding_refuses_experts_when_expert_process_groups_are_missing(ranks):
    for rank in ranks:
        no_stats, no_dp = rank["forgotten groups"]
        assert "expert_dp has 2 of the 4 ranks of dp" in no_stats
        assert "set expert_grad_stats" in no_stats
        assert "process_groups.expert_dp=None" in no_dp


def test_grad_norm_counts_tensor_parallel_duplicates_and_tied_params_once(ranks):
    expected = math.sqrt(300 * (3.0**2 + 4.0**2 + 6.0**2))
    for rank in ranks:
        assert rank["duplicates"] == [pytest.approx(expected, rel=1e-12)] * 2


def test_sharded_load_takes_shards_of_whole_state_and_refuses_other_shard_ranges(ranks):
    assert all(
        "shard has elements [" in rank["other ranges"]
        and "mp_optim.checkpoint" in rank["other ranges"]
        for rank in ranks
    )
    assert all(rank["whole state"] for rank in ranks)


@pytest.mark.parametrize("layout, fp32", BYTES)
def test_sharded_memory_and_traffic_match_the_documented_formula(ranks, layout, fp32):
    """README.md gives the bytes per parameter on n ranks."""
    for rank in ranks:
        found = rank["bytes"][str((layout, fp32))]
        grads, n = 4 if fp32 else 2, 4
        held = {
            "no_shard": 2 + grads + 12,
            "optim": 2 + grads + 12 / n,
            "optim_grads": 2 + grads / n + 12 / n,
        }[layout]
        assert found["held"] == pytest.approx(held * found["params"], rel=0.02)
        assert found["planned"] == pytest.approx(
            ranks[0]["bytes"][str((layout, fp32))]["held"], rel=0.005
        )
        assert found["bytes_reduced"] == pytest.approx(grads * found["params"], rel=0.02)
        sent = found["bytes_reduced"] + found["bytes_gathered"]
        # Gradients are gathered with no_shard, and parameters otherwise.
        back = grads if layout == "no_shard" else 2
        assert sent == pytest.approx((grads + back) * found["params"], rel=0.02)


def test_sharding_error_names_the_cause_when_calls_come_in_a_wrong_order(ranks):
    for rank in ranks:
        found = rank["misuse"]
        for how in ("second backward", "no zero_grad"):
            assert "got a gradient after the gradients of this step were reduced" in found[how]
        assert (
            "dense was used without a call of the module that holds it"
            in found["module not called"]
        )
        assert found["waited by hand"] == "no error"


def test_sharded_step_gives_equal_bits_when_ranks_run_different_backward_counts(ranks):
    """All ranks must run collectives in one order, but a rank does not know how many gradients the
    other ranks have."""
    for rank in ranks:
        zeros, nothing = rank["passes of some"]
        assert nothing == zeros == ranks[0]["passes of some"][0]


def test_chained_optimizer_steps_when_ranks_have_different_numbers_of_parts(ranks):
    """Ranks have one or two expert parts, and a part is shared by ranks that have that part."""
    assert [rank["parts of some"] for rank in ranks] == ["no error"] * 4


def test_sharded_construction_names_ranks_with_other_params_or_settings_on_every_rank(ranks):
    for rank in ranks:
        found = rank["disagree"]
        assert (
            "rank 1 has 'group 1 position 0: w40 (40,) torch.float32 trained' where rank 0 has"
            in found["model"]
        )
        assert "rank 2 has 'lr=0.2' where rank 0 has 'lr=0.1'" in found["config"]
        assert "rank 1 has 'group 0 position 0: w50 (50,)" in found["order"]
        assert "rank 2 has 'lr=0.3 of the group of w50' where rank 0 has 'lr=0.1 of" in found["lr"]
