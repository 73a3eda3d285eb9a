"""Muon under Megatron: the factory of core 0.16, and whole matrices on each rank of its DDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from support.launch import results_of_ranks

core = pytest.importorskip("megatron.core.optimizer")
muon = pytest.importorskip("megatron.core.optimizer.muon")

from mp_optim.apps import megatron  # noqa: E402


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return results_of_ranks("megatron_muon", 2, tmp_path_factory.mktemp("muon"))


@pytest.mark.parametrize("rank", [0, 1])
def test_muon_over_megatron_ddp_has_bits_of_one_process(ranks: list[Any], rank: int) -> None:
    of_rank = ranks[rank]
    for name, value in of_rank["plain"].items():
        assert torch.equal(of_rank["sharded"][name], value), name
    alone, sharded = of_rank["norms"]
    assert sharded == pytest.approx(alone, rel=1e-12)


def test_muon_steps_whole_matrices_of_megatrons_ddp(ranks: list[Any]) -> None:
    first, second = (rank["shapes"] for rank in ranks)
    assert sorted([first["first.weight"], second["first.weight"]]) == [[0, 16], [16, 16]]
    assert first["second.weight"][0] + second["second.weight"][0] == 256


@pytest.mark.parametrize("rank", [0, 1])
def test_muon_resumes_with_equal_bits_from_one_file_per_rank(ranks: list[Any], rank: int) -> None:
    for name, value in ranks[rank]["gone on"].items():
        assert torch.equal(ranks[rank]["resumed"][name], value), name


def test_muon_names_the_flag_when_ddp_buffers_split_matrices(ranks: list[Any]) -> None:
    said = ranks[0]["refusal"]
    assert said.startswith("use_layer_wise_distributed_optimizer=True")
    assert "--no-use-layer-wise-param-layout" in said and "--optimizer muon" in said


@pytest.fixture
def theirs() -> Iterator[Any]:
    present = muon.get_megatron_muon_optimizer
    megatron.install()
    try:
        yield present
    finally:
        megatron.uninstall()
    assert muon.get_megatron_muon_optimizer is present


@pytest.mark.parametrize("chosen", ["adam", "muon"])
@pytest.mark.parametrize("layer_wise", [False, True])
def test_muon_factory_of_core_0_16_builds_our_optimizer(
    theirs: Any, chosen: str, layer_wise: bool
) -> None:
    if muon.get_megatron_muon_optimizer is theirs:
        pytest.skip("this Megatron's calls get_megatron_optimizer")

    def build(factory: Any, optimizer: str, **arguments: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        config = core.OptimizerConfig(optimizer=optimizer, lr=1e-2)
        made = factory(config, [model], **arguments)
        assert isinstance(made, core.MegatronOptimizer)
        for param in model.parameters():
            param.main_grad = torch.arange(param.numel()).float().view(param.shape)
        assert made.step()[0]
        return [param.detach() for param in model.parameters()]

    name = "layer_wise_distributed_optimizer"
    if layer_wise:
        with pytest.raises(ValueError, match="the job has one process"):
            build(muon.get_megatron_muon_optimizer, chosen, **{name: True})
        return
    ours = build(muon.get_megatron_muon_optimizer, chosen, **{name: False})
    same = build(core.get_megatron_optimizer, "muon")
    assert all(map(torch.equal, ours, same))


def test_install_names_unknown_arguments_of_the_muon_factory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def newer(config: Any, model_chunks: Any, telepathy: bool = False) -> None: ...

    newer.__module__ = core.__name__

    present = core.get_megatron_optimizer
    monkeypatch.setattr(muon, "get_megatron_muon_optimizer", newer)
    with pytest.raises(RuntimeError, match=r"muon_optimizer has arguments telepathy, which"):
        megatron.install()
    assert core.get_megatron_optimizer is present
