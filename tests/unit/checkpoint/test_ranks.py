"""Ranks with different parameters save, export and fail together."""

import pytest

from support.launch import results_of_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return results_of_ranks("ranks", 2, folder, timeout=120)


@pytest.mark.parametrize("what", ["different", "grown", "background_", "exported"])
def test_ranks_with_different_parameters_save_and_export(ranks, what):
    assert [rank[what] for rank in ranks] == [True, True]


@pytest.mark.parametrize(
    ("what", "kind", "text", "where"),
    [
        ("extra", "ValueError", "numbers, strings, tensors", 0),
        ("disk", "OSError", "No space left on device", 1),
        ("background", "RuntimeError", "version-1 failed", 1),
        (
            "other shape",
            "ValueError",
            "model.w is torch.float32 (1,), whole on rank 0, but torch.float32 (2,)",
            0,
        ),
        (
            "other values",
            "ValueError",
            "model.weight: ranks 0 and 1 have different values under this name",
            0,
        ),
        ("export", "ValueError", "parameters ['x'] are not on this rank", 0),
        ("another model", "ValueError", "missing ['model.x', 'optimizer.state.exp_avg.x'", 1),
    ],
)
def test_save_and_load_raise_on_every_rank_when_one_rank_fails(ranks, what, kind, text, where):
    for number, rank in enumerate(ranks):
        assert rank[what].startswith(f"{kind}: ") and text in rank[what]
        assert number == where or f"rank {where}: " in rank[what]


@pytest.mark.parametrize(
    ("name", "on_rank_1", "on_rank_0"),
    [
        ("asynchronous", "True", "False"),
        ("full_precision", "True", "False"),
        ("keep", "0", "1"),
        ("path", "", "failures'"),
        ("the call", "'load'", "'save'"),
        ("convert", "True", "False"),
        ("verify", "True", "False"),
    ],
)
def test_checkpoint_call_names_the_argument_that_differs_between_ranks(
    ranks, name, on_rank_1, on_rank_0
):
    for rank in ranks:
        said = rank[f"other {name}"]
        assert said.startswith("ValueError: ") and "same arguments on every rank" in said
        assert (
            f'rank 1 has "{name}={on_rank_1}' in said or f"rank 1 has '{name}={on_rank_1}" in said
        )
        assert f'{on_rank_0}"' in said or f"{name}={on_rank_0}'" in said
        assert rank["versions"] == "['version-1']"


def test_save_leaves_no_files_when_a_rank_failed(ranks):
    assert ranks[0]["left"] == "[]"
