"""Division of Muon's matrices over ranks: owners, exchange batches and matrix parts."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mp_optim.core.tensor_layout import parts_on_mesh
from mp_optim.muon.matrix_exchange import (
    assembled,
    assign,
    cut_matrix,
    exchange_batches,
    plan_exchange,
)

few = settings(max_examples=25, deadline=None)


def loads_of(owners, costs, ranks):
    return [
        sum(cost for owner, cost in zip(owners, costs, strict=True) if owner == rank)
        for rank in range(ranks)
    ]


@few
@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 5))
def test_matrix_owners_balance_costs_of_ranks_within_the_cost_of_one_matrix(costs, ranks):
    held = [[index % 3] * ranks for index in range(len(costs))]
    owners = assign(costs, held, [0] * ranks)
    loads = loads_of(owners, costs, ranks)
    assert len(owners) == len(costs) and sum(loads) == sum(costs)
    assert max(loads) - min(loads) <= max(costs, default=0)


@few
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=20), st.integers(1, 40))
def test_muon_exchange_sends_each_matrix_once_in_batches_within_the_limit(matrices, limit):
    owners, sizes = [owner for owner, _ in matrices], [size for _, size in matrices]
    found = exchange_batches(owners, sizes, 4, limit)
    assert sorted(itertools.chain(*found)) == list(range(len(matrices)))
    for batch in found:
        for rank in range(4):
            owned = [sizes[item] for item in batch if owners[item] == rank]
            assert sum(owned) <= limit or len(owned) == 1


def coordinates(mesh):
    return itertools.product(*map(range, mesh))


MESHES = [
    ((4,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((2, 3), (Shard(0), Shard(1))),
    ((2, 2), (Shard(0), None)),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
]


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (1, 9)], ids=str)
@pytest.mark.parametrize("mesh, cuts", MESHES, ids=str)
def test_matrix_parts_assemble_to_the_whole_matrix_on_every_mesh_rank(mesh, cuts, shape):
    axes = tuple(dim for dim, each in enumerate(cuts) if each is not None)
    found = [parts_on_mesh(shape, cuts, axes, mesh, at) for at in coordinates(mesh)]
    matrix = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    for parts in found:
        assert parts.parts == found[0].parts
        flats = cut_matrix(matrix, parts.parts[0])
        assert sum(map(len, flats)) == matrix.numel()
        assert torch.equal(assembled(shape, parts.parts[0], flats), matrix)
    if cuts == (Shard(1),):
        assert torch.equal(flats[0], matrix.chunk(3, 1)[0].flatten())


def test_matrix_parts_contain_only_local_experts_when_experts_are_sharded():
    mesh, cuts = (2, 2), (Shard(0), Shard(1))
    counts = [len(parts_on_mesh((3, 4, 6), cuts, (1,), mesh, at).parts) for at in coordinates(mesh)]
    assert counts == [2, 2, 1, 1]


def test_muon_exchange_plan_is_equal_on_all_ranks_of_a_mesh():
    shapes, mesh, cuts = ([(64, 32), (6, 16, 16), (32, 96)], (2, 2), (Shard(-2), Shard(-1)))
    plans = []
    for at in coordinates(mesh):
        params = tuple(
            parts_on_mesh(shape, tuple(Shard(c.dim + len(shape)) for c in cuts), (0, 1), mesh, at)
            for shape in shapes
        )
        plans.append(plan_exchange(params, (9, 4, 7), (0,) * 4, 2))
    assert plans.count(plans[0]) == 4
    assert len(plans[0].items) == 8 and set(plans[0].owners) == set(range(4))
