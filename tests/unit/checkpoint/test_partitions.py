"""Parts of tensor parallelism, and experts and layers with rank-local numbers, are saved whole and
load in any layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_optim.core.partition import Box, partition
from support.launch import results_of_ranks
from support.workers.partitions import SETTINGS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("partitions")
    return results_of_ranks("partitions", 2, folder, timeout=120)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "what",
    ["parts step as the whole", "goes on to the bit", "joined", "cut again", "exported whole"],
)
def test_tensor_parallel_parts_are_saved_as_whole_parameters(ranks, name, what):
    assert [rank["sizes"][name][what] for rank in ranks] == [True, True]


def test_compact_moments_of_tensor_parallel_parts_load_when_parts_end_at_blocks(ranks):
    for rank in ranks:
        assert rank["compact"]["vector"] == [True, "no error", True]
        resumed, text, _ = rank["compact"]["fused"]
        assert resumed and "fused.exp_avg" in text and "convert=True" in text


def test_tensor_parallel_model_saves_and_loads_without_an_optimizer(ranks):
    for rank in ranks:
        joined, text = rank["model"]
        assert joined and "model_parallel=...: the call also has an optimizer" in text


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no group", "model.fused: ranks 0 and 1 have different values"),
        ("no stages", "model.layers.0.local_experts.0.weight: ranks 0 and 1 have"),
        ("dim", "fused.partition_dim=2: a parameter of shape (8, 6) has no such dimension"),
        ("stride", "fused.partition_stride=5: dimension 0 of (8, 6)"),
        ("sizes", "fused.partition_sizes=[3, 3]: the sizes add up to 6"),
        ("one name", "global_names makes one name of layers.0.local_experts.0"),
    ],
)
def test_save_refuses_parts_with_equal_names_or_wrong_partition_attributes(ranks, what, text):
    for rank in ranks:
        assert rank["refused"][what].startswith("ValueError: ")
        assert text in rank["refused"][what]
        if what.startswith("no "):
            for way in ("partition_dim", "process_groups.ep", "global_names="):
                assert way in rank["refused"][what]


def test_load_refuses_remainders_of_a_copied_parameter_when_weights_differ(ranks):
    for rank in ranks:
        text, unchanged = rank["other weights"]
        assert text.startswith("ValueError: ") and "copied" in text and unchanged
        assert "differ from those with which their remainders" in text


@pytest.mark.parametrize("kind", ["ep", "pp", "given"])
def test_save_gives_global_numbers_to_experts_and_layers_of_all_ranks(ranks, kind):
    assert [rank["names"][kind][0] for rank in ranks] == [True, True]
    whole = set()
    for rank in ranks:
        _, called, entries = rank["names"][kind]
        whole |= {*called}
    saved = {name.removeprefix("model.") for name in entries if name.endswith("seen")}
    numbers = {name.removesuffix(".seen") for name in saved}
    assert numbers >= {name.removesuffix(".weight") for name in whole if "fc1" not in name}
    if kind == "ep":
        fused = {f"experts.linear_fc1.weight{expert}" for expert in range(4)}
        assert numbers == {f"local_experts.{expert}" for expert in range(4)} | {"router"}
        assert fused <= whole and {f"model.{name}" for name in fused} <= {*entries}
    else:
        experts = [(layer, expert) for layer in range(3) for expert in range(4)]
        assert numbers - {"norm"} == {f"layers.{a}.local_experts.{b}" for a, b in experts}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return results_of_ranks("partitions", 4, folder, timeout=120)


def test_pipeline_stages_with_a_tied_embedding_resume(four_ranks):
    assert [rank["tied"] for rank in four_ranks] == [[True, True]] * 4


@given(
    before=st.lists(st.integers(1, 3), max_size=2),
    blocks=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    after=st.lists(st.integers(1, 3), max_size=2),
    size=st.integers(1, 5),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_partitions_of_all_ranks_cover_the_whole_tensor_once(before, blocks, after, size, data):
    dim, local = len(before), [*before, sum(blocks), *after]
    shape = [*before, sum(blocks) * size, *after]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    rebuilt = torch.full_like(whole, -1)
    for rank in range(size):
        cut = partition("p", local, dim, (1, blocks), rank, size)
        assert cut.whole_shape(local) == tuple(shape)
        fused = whole.split([size * block for block in blocks], dim)
        own = [
            each.narrow(dim, rank * block, block) for each, block in zip(fused, blocks, strict=True)
        ]
        expected = torch.cat(own, dim)
        index = torch.arange(expected.numel()).view(local)
        assert torch.equal(cut.whole_index(index, local), expected)
        sizes = [data.draw(st.integers(0, length)) for length in local]
        offsets = [
            data.draw(st.integers(0, length - some))
            for length, some in zip(local, sizes, strict=True)
        ]
        box = expected
        for axis, (first, count) in enumerate(zip(offsets, sizes, strict=True)):
            box = box.narrow(axis, first, count)
        for begin, piece in cut.cuts(Box(tuple(offsets), tuple(sizes))):
            there = whole
            for axis, (first, count) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                there = there.narrow(axis, first, count)
            assert torch.equal(there, box.narrow(dim, begin, piece.sizes[dim]))
        found = cut.cuts(Box((0,) * len(local), tuple(local)))
        assert sum(torch.Size(piece.sizes).numel() for _, piece in found) == expected.numel()
        for begin, piece in found:
            there = rebuilt
            for axis, (first, count) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                there = there.narrow(axis, first, count)
            assert (there == -1).all()
            there.copy_(expected.narrow(dim, begin, piece.sizes[dim]))
    assert torch.equal(rebuilt, whole)
