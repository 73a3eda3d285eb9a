"""A load that is refused has changed nothing, whatever it was refused for: model, state and
settings have the bits that they had, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mp_optim import checkpoint
from support.launch import run_ranks
from support.models import COMPACT, build, train
from support.prints import differing, print_of

LOSING = sorted(set(COMPACT) - {"remainder"})
"""Forms that FP32 state does not fit into."""

LOSS = r"cannot hold without loss|more bits than"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint with FP32 state, and the state dict."""
    model, optimizer = build("bf16")
    train(model, optimizer, 2)
    path = tmp_path_factory.mktemp("source")
    checkpoint.save(path, model, optimizer)
    return path, optimizer.state_dict()


@pytest.mark.parametrize("form", LOSING)
def test_state_that_would_lose_bits(
    source: tuple[Path, dict[str, Any]], form: str
) -> None:
    path, state = source
    model, optimizer = build(f"bf16-{form}", 0.5, seed=7)
    train(model, optimizer, 1)
    before = print_of(model, optimizer)
    with pytest.raises(ValueError, match=LOSS):
        optimizer.load_state_dict(state)
    assert differing(before, print_of(model, optimizer)) == []
    with pytest.raises(ValueError, match=LOSS):
        checkpoint.load(path, model, optimizer)
    assert differing(before, print_of(model, optimizer)) == []


def lower_second_moment(state: dict[str, Any]) -> None:
    state["exp_avg_sq"].view(-1)[-1] = -1.0


def halve_step(state: dict[str, Any]) -> None:
    state["step"].fill_(1.5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lower_second_moment, "negative elements"), (halve_step, "a whole number")],
    ids=["negative second moment", "half a step"],
)
@pytest.mark.parametrize("form", ["bf16", "bf16-remainder", "fp32"])
def test_values_that_no_step_leaves(
    tmp_path: Path, form: str, damage: Any, message: str
) -> None:
    """The last parameter has them, so everything before it fits."""
    model, optimizer = build(form)
    train(model, optimizer, 2)
    damage(list(optimizer.state.values())[-1])
    checkpoint.save(tmp_path, model, optimizer)
    state = optimizer.state_dict()
    model, optimizer = build(form, 0.5, seed=7)
    train(model, optimizer, 1)
    before = print_of(model, optimizer)
    for load in (
        lambda: optimizer.load_state_dict(state),
        lambda: checkpoint.load(tmp_path, model, optimizer),
    ):
        with pytest.raises(ValueError, match=message):
            load()
        assert differing(before, print_of(model, optimizer)) == []


def test_state_that_fits_on_one_rank_and_not_on_the_other(tmp_path: Path) -> None:
    run_ranks("refused", 2, str(tmp_path), timeout=120)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0].keys() == found[1].keys() and len(found[0]) == 2
    for of_rank in found:
        for name, (error, changed) in of_rank.items():
            assert "cannot hold without loss" in error, name
            assert changed == [], name
    assert all("rank 1: " in error for error, _ in found[0].values())
