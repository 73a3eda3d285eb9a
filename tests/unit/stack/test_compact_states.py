"""Compact states in the whole stack: equal bits, saves, loads and conversions."""

import copy
import zlib

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer
from mp_optim.core import Slot
from support.kernels import NEED_KERNELS
from support.models import COMPACT, build, train
from support.offload import differing, params_of, state_of

PAIRS = [
    *(("bf16-4bit", "adam"), ("fp16-8bit", "adam"), ("bf16-8bit8", "lamb")),
    *(("bf16-stochastic", "lion"), ("bf16-stochastic", "sgd")),
]
"""Pairs of state form and rule. Random programs draw the other pairs."""


def mains(optimizer):
    return {name: main.detach().clone() for name, main in optimizer.named_main_params()}


@pytest.mark.parametrize(("form", "rule"), PAIRS)
def test_compact_state_resumes_with_equal_bits_for_every_offload_fraction(tmp_path, form, rule):
    runs = []
    settings = {"optimizer": rule, "lr": 1e-3 if rule == "lion" else 1e-2}
    if rule in ("lion", "sgd"):  # These rules have no second moment.
        settings["exp_avg_sq_dtype"] = "float32"
    if "stochastic" in form:
        settings["param_remainder_bits"] = 8
    for index, fraction in enumerate((0.0, 0.4, 1.0)):
        model, optimizer = build(form, fraction, **settings)
        losses = train(model, optimizer, 3)
        if index:  # The run continues with another fraction.
            checkpoint.save(tmp_path / str(index), model, optimizer)
            model, optimizer = build(form, 1.0 - fraction, seed=9, **settings)
            checkpoint.load(tmp_path / str(index), model, optimizer)
        runs.append(
            (losses + train(model, optimizer, 3, start=3), params_of(model), state_of(optimizer))
        )
    assert runs[0][0][-1] < runs[0][0][0]
    for losses, params, state in runs[1:]:
        assert losses == runs[0][0]
        assert differing(params, runs[0][1]) == []
        assert differing(state, runs[0][2]) == []


def test_full_precision_8bit_state_loads_without_convert():
    """Stochastic rounding gives the largest value of a block the second largest code in some of
    2,000
    blocks."""
    built = [nn.Parameter(torch.ones(512, 512, dtype=torch.bfloat16)) for _ in range(2)]
    settings = {**COMPACT["8bit"], "stochastic_rounding": True}
    config = OptimizerConfig(lr=0.01, bf16=True, use_precision_aware_optimizer=True, **settings)
    optimizer, other = (
        get_megatron_optimizer(config, nn.ParameterList([param])) for param in built
    )
    built[0].grad = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    optimizer.step()
    other.load_state_dict(optimizer.state_dict(full_precision=True))
    assert differing(state_of(other), state_of(optimizer)) == []


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("saved_bits", [8, 16])
def test_load_shortens_main_params_to_fewer_bits_only_with_convert(bits, saved_bits):
    def stack(bits, seed=0):
        settings = {"exp_avg_dtype": "float32", "exp_avg_sq_dtype": "float32"}
        return build("bf16-remainder", seed=seed, param_remainder_bits=bits, **settings)

    source_model, source = stack(saved_bits)
    train(source_model, source, 2)
    saved = copy.deepcopy(source.state_dict(full_precision=True))
    model, optimizer = stack(bits, seed=4)
    model.load_state_dict(source_model.state_dict())
    if bits < saved_bits:
        with pytest.raises(ValueError, match="more bits than a bfloat16 parameter and an 8-bit"):
            optimizer.load_state_dict(saved)
        optimizer.load_state_dict(saved, convert=True)
    else:
        optimizer.load_state_dict(saved)
        assert differing(mains(optimizer), mains(source)) == []


def test_load_compacts_fp32_state_only_with_convert(tmp_path):
    wide_model, wide = build("bf16")
    train(wide_model, wide, 3)
    checkpoint.save(tmp_path, wide_model, wide)
    for form, loses in (
        ("bf16-remainder", False),
        ("bf16-bf16", True),
        ("bf16-8bit", True),
        ("bf16-8bit8", True),
        ("bf16-4bit", True),
    ):
        model, optimizer = build(form, 0.5, seed=4)
        if loses:
            before = state_of(optimizer)
            with pytest.raises(ValueError, match=r"without loss|more bits than"):
                checkpoint.load(tmp_path, model, optimizer)
            assert differing(state_of(optimizer), before) == []
        checkpoint.load(tmp_path, model, optimizer, convert=loses)
        assert form == "bf16-8bit8" or not differing(mains(optimizer), mains(wide))
        assert train(model, optimizer, 2, start=3) == pytest.approx(
            train(*copy_of(tmp_path, "bf16"), 2, start=3), abs=0.02
        )


def copy_of(path, form):
    model, optimizer = build(form, seed=8)
    checkpoint.load(path, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("form", ["bf16-remainder", "bf16-8bit", "bf16-8bit8", "bf16-bf16"])
def test_load_widens_compact_state_to_fp32_without_loss(tmp_path, form):
    model, optimizer = build(form, 0.5)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path, model, optimizer)
    wide_model, wide = copy_of(tmp_path, "bf16")
    assert differing(mains(wide), mains(optimizer)) == []
    full = optimizer.full_slot_state(Slot(0, 0))
    assert differing(dict(wide.slot_state(Slot(0, 0))), full) == []
    if form == "bf16-remainder":
        assert train(wide_model, wide, 2, start=3) == train(model, optimizer, 2, start=3)


def test_reload_model_params_keeps_fp32_values_in_remainders():
    model, optimizer = build("bf16-remainder")
    exact = torch.full((8, 8), 1.0 + 2.0**-20)
    optimizer.reload_model_params({"dense": exact})
    assert torch.equal(dict(optimizer.named_main_params())["dense"], exact)
    assert torch.equal(model.dense, torch.ones(8, 8, dtype=torch.bfloat16))


def test_stochastic_rounding_gives_equal_bits_for_a_seed_in_every_placement():
    runs = {}
    for seed, fraction in ((0, 0.0), (0, 0.7), (1, 0.0)):
        model, optimizer = build("bf16-stochastic", fraction, stochastic_rounding_seed=seed)
        train(model, optimizer, 3)
        runs[seed, fraction] = state_of(optimizer)
    assert differing(runs[0, 0.7], runs[0, 0.0]) == []
    assert any(not torch.equal(value, runs[1, 0.0][key]) for key, value in runs[0, 0.0].items())


@pytest.mark.parametrize("backend", [pytest.param("native", marks=NEED_KERNELS), "reference"])
def test_stochastic_rounding_differs_when_two_names_share_a_crc32(backend):
    names = ("plumless", "buckeroo")
    assert len({zlib.crc32(name.encode()) for name in names}) == 1
    params = [nn.Parameter(torch.ones(1000).bfloat16()) for _ in names]
    optimizer = mp_optim.AdamW(
        zip(names, params, strict=True), state="8bit", stochastic_rounding=True, backend=backend
    )
    for param in params:
        param.grad = torch.linspace(-1.0, 1.0, 1000).bfloat16()
    optimizer.step()
    first, second = (optimizer.state[param]["exp_avg"] for param in params)
    assert not torch.equal(first, second)
