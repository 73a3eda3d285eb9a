"""Parameters below the size limit of 8-bit and 4-bit codes keep FP32 state."""

from typing import Any

import pytest
import torch

from support.launch import results_of_ranks
from support.models import same_bits
from support.workers.small_states import BELOW, LAYOUTS, SHAPES


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_ranks("small_states", 2, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_state_threshold_counts_whole_params_when_sharded(ranks, layout):
    expected = {name: torch.Size(shape).numel() < BELOW for name, shape in SHAPES.items()}
    for rank in ranks:
        assert rank[layout]["is_small"] == expected
        assert all(rank[layout]["resumed"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_params_have_moments_with_the_bits_of_one_process_when_sharded(ranks, layout):
    for rank in ranks:
        for name, moment in rank[layout]["moments"].items():
            assert same_bits(moment, rank["alone"]["moments"][name]), name
