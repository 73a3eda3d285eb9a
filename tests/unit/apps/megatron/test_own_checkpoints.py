"""A checkpoint of ``mp_optim.checkpoint`` keeps its bits in every layout of a Megatron model."""

from typing import Any

import pytest
import torch

from mp_optim import checkpoint
from support.launch import results_of_ranks
from support.models import TinyMoE, train

core = pytest.importorskip("megatron.core.optimizer")
from mp_optim.apps import megatron  # noqa: E402

LAYOUTS = ["one", "tp 2, zero", "pp 2, virtual, zero", "tp 2, ep 2"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("layouts")
    return results_of_ranks("megatron_layouts", 4, folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoint_load_gives_each_rank_the_parameter_parts_of_its_megatron_layout(ranks, layout):
    for rank in ranks:
        count, wrong, *_ = rank[layout]
        assert count > 10 and not wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoint_saves_the_loaded_values_in_each_megatron_layout(ranks, layout):
    assert [rank[layout][2] for rank in ranks] == [[]] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoint_resumes_with_equal_bits_in_each_megatron_layout(ranks, layout):
    assert [rank[layout][3] for rank in ranks] == [True] * 4


def test_installed_optimizer_resumes_from_our_checkpoint_with_equal_losses(tmp_path):
    def build() -> tuple[Any, Any]:
        model = TinyMoE(torch.bfloat16)
        config = core.OptimizerConfig(lr=1e-2, bf16=True)
        return model, megatron.get_megatron_optimizer(config, [model])

    model, optimizer = build()
    train(model, optimizer, 3)
    checkpoint.save(tmp_path, [model], optimizer)
    again = build()
    checkpoint.load(tmp_path, [again[0]], again[1], convert=False)
    assert train(*again, 3, 3) == train(model, optimizer, 3, 3)
