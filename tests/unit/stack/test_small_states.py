"""Parameters below the size limit of 8-bit and 4-bit codes keep FP32 state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mp_optim import checkpoint
from support.launch import results_of_ranks
from support.models import build, same_bits, train
from support.offload import differing, snapshot
from support.workers.small_states import BELOW, LAYOUTS, SHAPES


@pytest.mark.parametrize("via", ["state dict", "checkpoint"])
def test_load_changes_fp32_state_below_threshold_only_with_convert(
    via: str, tmp_path: Path
) -> None:
    coded, small = {"fp32_state_below": 0}, {"fp32_state_below": 100}

    def load(source: Any, target: Any, **how: Any) -> None:
        if via == "state dict":
            target[0].load_state_dict(source[0].state_dict())
            target[1].reload_model_params()
            target[1].load_state_dict(source[1].state_dict(), **how)
        else:
            checkpoint.save(tmp_path / "ck", *source)
            checkpoint.load(tmp_path / "ck", *target, **how)

    def first(pair: Any) -> Tensor:
        slot = next(s for s in pair[1].slots() if pair[1].slot_name(s) == "bias")
        value: Tensor = pair[1].full_slot_state(slot)["exp_avg"]
        return value.clone()

    saved, target = build("bf16-8bit", **coded), build("bf16-8bit", **small)
    train(*saved, 2)
    load(saved, target)  # Every code has an exact FP32 value.
    assert same_bits(first(saved), first(target))
    saved, target = build("bf16-8bit", **small), build("bf16-8bit", **coded)
    train(*saved, 2)
    target[0].load_state_dict(saved[0].state_dict())
    before = snapshot(*target)
    with pytest.raises(ValueError, match=r"\.exp_avg.* without loss.*convert=True"):
        load(saved, target)
    assert differing(snapshot(*target), before) == []
    load(saved, target, convert=True)
    torch.testing.assert_close(first(saved), first(target), rtol=0.05, atol=1e-3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_ranks("small_states", 2, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_state_threshold_counts_whole_params_when_sharded(
    ranks: list[dict[str, Any]], layout: str
) -> None:
    expected = {name: torch.Size(shape).numel() < BELOW for name, shape in SHAPES.items()}
    for rank in ranks:
        assert rank[layout]["is_small"] == expected
        assert all(rank[layout]["resumed"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_state_has_the_bits_of_one_process(ranks: list[dict[str, Any]], layout: str) -> None:
    for rank in ranks:
        for name, moment in rank[layout]["moments"].items():
            assert same_bits(moment, rank["alone"]["moments"][name]), name
