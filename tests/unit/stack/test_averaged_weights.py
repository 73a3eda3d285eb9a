"""Averages of main params: values, refused calls, interrupts and checkpoints."""

import copy
import math

import pytest
import torch

from mp_optim import checkpoint
from mp_optim.core.interrupted_step import BrokenOffError
from mp_optim.monitor import averaged_weights
from support.models import build, same_bits, train
from support.offload import differing, snapshot

AVERAGE = "averaged_param"


def averages(optimizer):
    return {
        optimizer.slot_name(slot): optimizer.slot_state(slot)[AVERAGE] for slot in optimizer.slots()
    }


def mains(optimizer):
    return {name: main.detach().double() for name, main in optimizer.named_main_params()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_averaged_weights_follow_a_float64_oracle_for_200_steps(dtype):
    decay, rounded = 0.99, dtype == "bfloat16"
    settings = {"ema_decay": decay, "ema_dtype": dtype, "stochastic_rounding": rounded}
    model, optimizer = build("bf16", experts=False, lr=2e-3, **settings)
    oracle = {}
    largest = 0.0
    for step in range(200):
        train(model, optimizer, 1, start=step)
        for name, main in mains(optimizer).items():
            before = oracle.get(name, main)
            oracle[name] = before + (1 - decay) * (main - before)
            largest = max(largest, float(main.abs().max()))
    errors = [averages(optimizer)[name].double() - oracle[name] for name in oracle]
    error = torch.cat([each.flatten() for each in errors])
    exponent = math.floor(math.log2(largest))
    if rounded:
        ulp = 2.0 ** (exponent - 7)
        assert float(error.abs().max()) < 4 * ulp
        assert abs(float(error.mean())) < 0.05 * ulp
    else:
        assert float(error.abs().max()) <= 0.5 / (1 - decay) * 2.0 ** (exponent - 23)
    moved = [float((oracle[n] - main).abs().max()) for n, main in mains(optimizer).items()]
    assert min(moved) > 1e-3  # Weights must move, or an average that only copies them would pass.


def test_averaged_weights_refuses_step_save_and_load_inside_its_block(tmp_path):
    model, optimizer = build("bf16", ema_decay=0.9)
    train(model, optimizer, 1)
    saved, before = optimizer.state_dict(), snapshot(model, optimizer)
    refused = [
        optimizer.step,
        optimizer.state_dict,
        optimizer.averaged_weights().__enter__,
        lambda: optimizer.load_state_dict(saved),
        lambda: list(optimizer.named_main_params()),
        lambda: checkpoint.save(tmp_path, model, optimizer),
        lambda: checkpoint.load(tmp_path, model, optimizer),
        optimizer.reload_model_params,
    ]
    checkpoint.save(tmp_path, model, optimizer)
    with optimizer.averaged_weights():
        for call in refused:
            with pytest.raises(RuntimeError, match=r"inside .*averaged_weights"):
                call()
    assert differing(snapshot(model, optimizer), before) == []
    _, without = build("bf16")
    with pytest.raises(ValueError, match="set ema_decay"), without.averaged_weights():
        pass


def test_step_refuses_after_an_interrupt_in_the_exit_of_averaged_weights(monkeypatch):
    model, optimizer = build("bf16", ema_decay=0.9)
    train(model, optimizer, 2)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(averaged_weights, "swap_back", interrupted)
        with optimizer.averaged_weights():
            pass
    with pytest.raises(BrokenOffError, match="was interrupted"):
        optimizer.step()
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)
    train(model, optimizer, 1, start=2)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16-remainder"])
def test_averages_start_from_main_params_when_the_checkpoint_has_no_averages(precision, tmp_path):
    model, optimizer = build(precision)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path, model, optimizer)
    saved = mains(optimizer)
    other, averaging = build(precision, seed=7, fraction=0.5, ema_decay=0.9)
    with pytest.warns(UserWarning, match="no average for 7 parameters"):
        checkpoint.load(tmp_path, other, averaging)
    assert all(map(torch.equal, averages(averaging).values(), saved.values()))
    train(other, averaging, 1, start=3)
    weight = torch.tensor(0.1, dtype=torch.float64).float()
    for name, main in mains(averaging).items():
        start = saved[name].float()
        assert same_bits(averages(averaging)[name], start + (main.float() - start) * weight)


def test_load_drops_saved_averages_only_with_convert(tmp_path):
    model, optimizer = build("bf16", ema_decay=0.9)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path, model, optimizer)
    other, without = build("bf16", seed=7)
    with pytest.raises(ValueError, match=r"averaged_param.*without averages.*convert=True"):
        checkpoint.load(tmp_path, other, without)
    with pytest.raises(ValueError, match="ema_decay"):
        without.load_state_dict(optimizer.state_dict())

    def taken_over(without):
        assert mains(without).keys() == mains(optimizer).keys()
        assert all(map(torch.equal, mains(without).values(), mains(optimizer).values()))
        assert not any(AVERAGE in state for state in without.state_dict()["state"].values())

    checkpoint.load(tmp_path, other, without, convert=True)
    taken_over(without)
    other, without = build("bf16", seed=7)
    other.load_state_dict(model.state_dict())
    without.load_state_dict(optimizer.state_dict(), convert=True)
    taken_over(without)
