"""Plain tensor parallelism: the parts of a parameter have the bits of one process."""

import pytest

from support.launch import results_of_ranks
from support.models import same_bits
from support.workers.plain_parts import CUTS, LAYOUTS, REFUSED


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of_ranks("plain_parts", 4, tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_normuon_gives_tensor_parallel_parts_the_bits_of_one_process(ranks, layout):
    for rank in ranks:
        wanted, found = rank["expected"], rank[layout]
        differing = [name for name in CUTS if not same_bits(found[name], wanted[name])]
        assert differing == []


@pytest.mark.parametrize("what", REFUSED)
def test_muon_refuses_speculation_and_wrong_strides_for_tensor_parallel_parts(ranks, what):
    for rank in ranks:
        assert REFUSED[what].says in rank[f"refused {what}"]
