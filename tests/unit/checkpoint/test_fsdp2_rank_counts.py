"""FSDP2 checkpoints load on any number of ranks with the same bits, or are refused."""

import json

import pytest

from mp_optim import checkpoint
from support.launch import results_of_ranks, run_ranks
from support.workers.shrinking import LAYOUTS


def test_fsdp2_checkpoint_of_two_ranks_loads_on_one_rank_and_on_three_ranks(tmp_path):
    found = {}
    for of_rank in results_of_ranks("other_worlds", 3, tmp_path, timeout=150):
        for name, value in of_rank.items():
            found.setdefault(name, []).append(value)
    assert len(found) == 16
    for name, values in found.items():
        if name.partition(",")[0] in ("8 bits", "4 bits") and "rows" not in name:
            for value in values:
                assert "cannot hold without loss" in value, name
                assert "Each 256 elements" in value, name
        else:
            assert values == [True] * len(values), name


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shrinking")
    run_ranks("shrinking", 3, str(folder), timeout=100)
    return folder, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_save_by_fewer_ranks_keeps_the_last_version_and_fails_when_state_is_sharded(shrunk, layout):
    folder, found = shrunk
    errors = [found[f"{layout} {size}"] for size in (2, 1)]
    if layout == "no_shard":  # Each rank holds all state.
        assert errors == ["no error", "no error"]
    else:
        for error in errors:
            assert (
                "the ranks that save hold " in error and "build model and optimizer again" in error
            ), error
        assert [path.name for path in checkpoint.versions(folder / layout)] == ["version-1"]
    assert [path.name for path in (folder / layout).glob(".*")] == []
    checkpoint.verify(folder / layout)


# torch raises its own error there
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "fsdp2"])
def test_step_names_the_destroyed_process_group_when_ranks_are_gone(shrunk, layout):
    error = shrunk[1][f"{layout} step"]
    assert error.startswith("RuntimeError: "), error
    assert "process group of 3 ranks was destroyed; build the optimizer again" in error
