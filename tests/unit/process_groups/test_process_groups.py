import gc
import weakref
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mp_optim import ProcessGroups
from mp_optim.process_groups.agreement import agree_on_largest
from support.one_rank import one_rank


def test_process_groups_are_read_from_megatron_attribute_names():
    groups = ProcessGroups.from_attributes(
        SimpleNamespace(mp="mp", tp="tp", expt_tp="et", tp_ep_pp="tep", dp="dp")
    )
    assert (
        groups.grad_stats,
        groups.expert_grad_stats,
        groups.tp,
        groups.expert_tp,
        groups.dp,
        groups.expert_dp,
    ) == ("mp", "tep", "tp", "et", "dp", None)


def test_process_groups_are_read_from_device_mesh_dim_names(tmp_path):
    with one_rank():
        groups = ProcessGroups.from_device_mesh(
            dist.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "pp", "tp"))
        )
        assert groups.grad_stats is not None and groups.dp is not None and groups.tp is not None
        experts = ProcessGroups.from_device_mesh(
            dist.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        )
        assert (
            experts.expert_dp.size() == experts.dp.size() == experts.expert_grad_stats.size() == 1
        )
        with pytest.raises(ValueError, match="mesh_dim_names"):
            ProcessGroups.from_device_mesh(
                dist.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
            )


def test_agree_on_largest_frees_local_variables_of_a_failed_call_at_once(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    held = []

    def fails():
        local = ProcessGroups()
        held.append(weakref.ref(local))
        raise ValueError("no share fits")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no share fits"):
            agree_on_largest([dist.group.WORLD], "choosing a share", fails)
        assert held[0]() is None
    finally:
        gc.enable()
        dist.destroy_process_group()
