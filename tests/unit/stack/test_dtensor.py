"""DTensor parameters (Megatron-LM #4623) with FSDP2 on a gloo mesh of two processes."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial

from mp_optim.core.tensor_layout import shard_groups_of
from support.launch import results_of_ranks
from support.models import build, tokens_of
from support.one_rank import one_rank
from support.workers.fsdp import CASES, HANDS, STEPS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    return results_of_ranks("fsdp", 2, folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_megatron_4623_fsdp2_trains_like_one_process(ranks, case):
    rule, precision, fraction = case
    sharded = ranks[0][str(case)]
    model, optimizer = build(precision, fraction, optimizer=rule)
    # FSDP2 averages two equal gradients, which is exact. Only the order of the norm's sum differs:
    # an
    # ulp of FP64, so at most an ulp of FP32 in the multiplier and an ulp of the model's dtype.
    ulp = torch.finfo(next(model.parameters()).dtype).eps
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens_of(step))
        optimizer.scale_loss(loss).backward()
        norm = optimizer.step().grad_norm
        assert sharded["norms"][step] == pytest.approx(norm, rel=16 * ulp if step else 1e-12)
        assert sharded["losses"][step] == pytest.approx(loss.item(), rel=16 * ulp)
    for name, main in optimizer.named_main_params():
        torch.testing.assert_close(
            sharded["mains"][name], main.detach(), rtol=0, atol=1e-2 * max(1e-4, 16 * ulp)
        )


def test_fsdp2_8bit_state_resumes_with_equal_bits(ranks):
    for rank in ranks:
        on_device, *others = rank["eight_bit"].values()
        assert others == [on_device] * 2


def test_fsdp2_cpu_offload_policy_changes_no_bit(ranks):
    for rank in ranks:
        assert len(rank["beside_fsdps"]) > 4 and all(rank["beside_fsdps"])


def test_fsdp2_ranks_agree_on_grad_norm_and_skipped_steps(ranks):
    for rank in ranks:
        # The squares of 2, 3 and the duplicate's 6 count once.
        assert rank["agreement"] == {"norm": pytest.approx(7.0, rel=1e-12), "skipped": True}


def test_fsdp2_rank_without_experts_steps_with_the_common_norm(ranks):
    assert [rank["experts"] for rank in ranks] == [
        {"norm": 5.0, "stubs": [False, True]},
        {"norm": 5.0, "stubs": [True, False]},
    ]


def test_shard_groups_refuses_a_partial_parameter(tmp_path):
    with one_rank():
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        param = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(ValueError, match=r"w: placement .*redistribute"):
            shard_groups_of("w", param)


@pytest.mark.parametrize("form", HANDS)
def test_dtensor_state_moved_by_hand_trains_with_equal_bits(ranks, form):
    assert [rank["hands"][form] for rank in ranks] == [[], []]


def test_state_of_dtensors_is_shown_on_the_host_when_offloaded(ranks):
    assert [rank["stays"] for rank in ranks] == [True, True]
