"""Parameters split by tensor parallelism and FSDP2 together."""

import dataclasses

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from mp_optim import FP32Optimizer, FusedAdam, HybridDeviceOptimizer, OptimizerConfig
from support.launch import results_of_ranks
from support.workers import mesh as mesh_worker
from support.workers.mesh import Net


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    return results_of_ranks("mesh", 4, folder, timeout=280)


@pytest.mark.parametrize("mode", ["None", "overlap"])
def test_step_reduces_partial_gradients_of_sequence_parallel_params(ranks, mode):
    """Sequence parallelism leaves a Partial gradient on a replicated parameter."""
    expected = mesh_worker.sequence_parallel(sharded=False)
    for rank in ranks:
        found = rank["sequence"][mode]
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for name, value in expected["params"].items():
            torch.testing.assert_close(found["params"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["overlap", "speculative"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_dtensor_gradients_are_released_during_backward_with_equal_bits(ranks, mode, shape):
    names = {name for name, _ in Net(16).named_parameters()}
    in_backward = names if shape == (4,) else names - {"stack"}
    for rank in ranks:
        kept, gone = (rank["released"][mode, shape, releases] for releases in (False, True))
        assert kept["gone"] == [set()] * 8 and gone["gone"] == [in_backward, names] * 4
        assert kept["norms"] == gone["norms"]
        assert all(
            torch.equal(value, gone["params"][name]) for name, value in kept["params"].items()
        )


class Rotated(Placement):
    def is_shard(self, dim=None):
        return False

    def is_replicate(self):
        return False

    def is_partial(self, reduce_op=None):
        return False

    def __eq__(self, other):
        return type(other) is Rotated

    def __hash__(self):
        return 7


@pytest.fixture
def mesh(one_rank):
    return torch.distributed.init_device_mesh("cpu", (1, 1))


def wrap(params):
    return FP32Optimizer(FusedAdam(params), OptimizerConfig())


@pytest.mark.parametrize(
    "build", [wrap, lambda params: HybridDeviceOptimizer(params, 0.5)], ids=["wrapped", "hybrid"]
)
@pytest.mark.parametrize(
    "placement, message",
    [
        (Partial(), "Partial parameter has no value"),
        (Partial("max"), "Partial parameter has no value"),
        (Rotated(), "Rotated.*not supported"),
    ],
    ids=["partial", "max", "unknown"],
)
def test_construction_refuses_a_dtensor_param_with_partial_or_unknown_placement(
    mesh, build, placement, message
):
    param = torch.nn.Parameter(
        DTensor.from_local(torch.ones(4, 2), mesh, [Replicate(), Replicate()], run_check=False)
    )
    param._spec = dataclasses.replace(param._spec, placements=(Replicate(), placement))
    with pytest.raises(ValueError, match=f"(?s){message}.*redistribute"):
        build([("w", param)])
