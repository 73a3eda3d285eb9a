"""Parameters that are too small for codes of 8 or 4 bits keep FP32 state."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mp_optim
from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer
from support.launch import results_of_ranks
from support.models import build, same_bits, train
from support.offload import differing, snapshot
from support.workers.small_states import BELOW, LAYOUTS, SHAPES

SMALL, LARGE = (7, 30), (8, 40)
SIZES = {"small": SMALL, "exact": (256,), "large": LARGE}


def grown(
    form: dict[str, Any], steps: int = 3, **fields: Any
) -> tuple[nn.ParameterDict, mp_optim.MegatronOptimizer]:
    """A model of three sizes, stepped with gradients that depend on nothing else."""
    generator = torch.Generator().manual_seed(3)
    values = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SIZES.items()
    }
    model = nn.ParameterDict({name: nn.Parameter(value) for name, value in values.items()})
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=0.01, bf16=True, use_precision_aware_optimizer=True, clip_grad=0.0, **form, **fields
        ),
        model,
    )
    for _ in range(steps):
        for name, param in model.items():
            value = torch.randn(SIZES[name], generator=generator)
            param.grad = value.bfloat16()
        optimizer.step()
    return model, optimizer


def state_of(optimizer: mp_optim.MegatronOptimizer) -> dict[str, dict[str, Tensor]]:
    return {optimizer.slot_name(slot): optimizer.slot_state(slot) for slot in optimizer.slots()}


FORMS = (
    *itertools.product(("uint8", "uint4"), ("adam", "lamb"), (False, True), ("native",)),
    *itertools.product(("uint8", "uint4"), ("lion", "sgd"), (True,), ("reference",)),
    # interpreted, each takes seconds; their kernels' bits are compared in test_triton.py
    ("uint8", "adam", False, "triton"),
    ("uint4", "lamb", True, "triton"),
    ("uint4", "lion", False, "triton"),
    ("uint8", "sgd", True, "triton"),
)


@pytest.mark.parametrize(("bits", "rule", "stochastic", "backend"), FORMS)
def test_each_has_the_bits_of_its_own_form(
    bits: str, rule: str, stochastic: bool, backend: str
) -> None:
    form: dict[str, Any] = {"optimizer": rule, "exp_avg_dtype": bits, "fused_backend": backend}
    if rule not in ("lion", "sgd"):
        form["exp_avg_sq_dtype"] = "uint8"
    coded = {**form, "stochastic_rounding": stochastic}
    plain = {"optimizer": rule, "fused_backend": backend}
    mixed, optimizer = grown({**coded, "fp32_state_below": 256})
    in_codes = grown(coded)
    expected = {"small": grown(plain), "exact": in_codes, "large": in_codes}
    found = state_of(optimizer)
    for name, (model, other) in expected.items():
        assert same_bits(mixed[name].detach(), model[name].detach()), name
        wanted = state_of(other)[name]
        assert found[name].keys() == wanted.keys()
        assert all(same_bits(found[name][key], value) for key, value in wanted.items()), name
    assert {value.dtype for key, value in found["small"].items() if key != "remainder"} == {
        torch.float32
    }


@pytest.mark.parametrize("via", ["state dict", "checkpoint"])
def test_another_number_is_another_form(via: str, tmp_path: Path) -> None:
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
    load(saved, target)  # every code has an FP32 value
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
    """What the two ranks of workers/small_states.py found."""
    return results_of_ranks("small_states", 2, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_whole_parameter_decides(ranks: list[dict[str, Any]], layout: str) -> None:
    """Of all of them a rank holds fewer elements than ``BELOW``."""
    expected = {name: torch.Size(shape).numel() < BELOW for name, shape in SHAPES.items()}
    for rank in ranks:
        assert rank[layout]["is_small"] == expected
        assert all(rank[layout]["resumed"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_state_has_the_bits_of_one_process(ranks: list[dict[str, Any]], layout: str) -> None:
    for rank in ranks:
        for name, moment in rank[layout]["moments"].items():
            assert same_bits(moment, rank["alone"]["moments"][name]), name
