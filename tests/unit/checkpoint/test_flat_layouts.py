"""``torch.distributed.checkpoint`` saves flat ranges and loads them into every layout of 1 to 4
ranks."""

from support.launch import results_of_ranks


def test_flat_checkpoint_loads_into_every_layout_of_1_to_4_ranks(tmp_path):
    found = results_of_ranks("flat", 4, tmp_path)
    assert [rank["wrong"] for rank in found] == [[]] * 4
    assert [rank["cases"] for rank in found] == [64, 56, 32, 16]
