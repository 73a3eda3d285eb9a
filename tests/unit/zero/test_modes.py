"""``train()`` and ``eval()`` of a foreign optimizer with sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.launch import results_of_ranks
from support.models import same_bits
from support.workers.modes import CASES, DTYPES, perform


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return results_of_ranks("modes", 2, tmp_path_factory.mktemp("modes"))


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {name: perform("alone", dtype) for name, dtype in DTYPES.items()}
    torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_rank_sees_the_weights_of_the_mode(
    ranks: list[dict[Any, Any]], alone: dict[str, dict[str, Any]], case: tuple[str, str]
) -> None:
    expected = alone[case[1]]
    trained, evaluated = expected["weights"][-2:]
    assert not all(map(same_bits, trained, evaluated))
    for rank in ranks:
        found = rank[case]
        assert found["losses"] == expected["losses"]
        for mine, theirs in zip(found["weights"], expected["weights"], strict=True):
            assert all(map(same_bits, mine, theirs))
        assert not any(found["modes"])
