"""Adam with ``betas[0]`` = 0 keeps no first moment: the bits are those of one that does."""

import copy

import pytest
import torch
from torch import nn

from mp_optim import AdamW, OptimizerConfig, checkpoint, get_megatron_optimizer
from mp_optim.apps import convert as foreign
from mp_optim.apps.fit.model_plan import plan
from support.models import build, same_bits, train
from support.offload import snapshot

PLACES = {
    "device": {},
    "host": {"fraction": 0.5},
    "speculative": {"fraction": 1.0, "offload_mode": "speculative"},
    "streamed": {"fraction": 1.0, "offload_place": "streamed"},
    "disk": {"fraction": 1.0},
}
EIGHT_BITS = "bf16-8bit"


def built(place, path, beta1=0.0, precision="bf16"):
    fields = dict(PLACES[place])
    if place == "disk":
        fields["optimizer_state_path"] = str(path)
    if place in ("streamed", "disk"):
        fields["stream_window_bytes"] = 1 << 16
    return build(precision, adam_beta1=beta1, adam_beta2=0.95, **fields)


def use(optimizer, beta1):
    for group in optimizer.param_groups:
        group["betas"] = (beta1, 0.95)


def keys(optimizer):
    found = {key for state in optimizer.state_dict()["state"].values() for key in state}
    return found & {"exp_avg", "exp_avg_scale", "exp_avg_sq"}


def assert_same_params(model, other):
    for (name, param), value in zip(model.named_parameters(), other.parameters(), strict=True):
        assert same_bits(param.detach(), value.detach()), name


@pytest.fixture(scope="module")
def kept():
    """Models of runs whose optimizer has a first moment, which betas[0] = 0 then makes needless."""
    models = {}
    for precision in ("bf16", EIGHT_BITS):
        model, optimizer = build(precision, adam_beta1=0.5, adam_beta2=0.95)
        optimizer.init_state()
        use(optimizer, 0.0)
        train(model, optimizer, 4)
        assert "exp_avg" in keys(optimizer)
        models[precision] = model
    return models


@pytest.mark.parametrize("place", PLACES)
def test_every_place_has_the_bits_of_a_first_moment_that_is_kept(place, kept, tmp_path):
    for precision in ("bf16", EIGHT_BITS) if place in ("device", "disk") else ("bf16",):
        model, optimizer = built(place, tmp_path, precision=precision)
        train(model, optimizer, 4)
        assert keys(optimizer) == {"exp_avg_sq"}
        assert_same_params(model, kept[precision])


@pytest.mark.parametrize("place", PLACES)
def test_betas_that_change_in_a_run(place, tmp_path):
    """To 0 and back: the moment goes on. From 0, once stepped without: refused, and harmless."""
    results = []
    for where in ("device", place):
        model, optimizer = built(where, tmp_path, 0.9)
        train(model, optimizer, 2)
        use(optimizer, 0.0)
        train(model, optimizer, 2, start=2)
        use(optimizer, 0.9)
        train(model, optimizer, 2, start=4)
        results.append(snapshot(model, optimizer))
    for name, value in results[0].items():
        assert same_bits(results[1][name], value), name
    model, optimizer = built(place, tmp_path)
    use(optimizer, 0.9)
    use(optimizer, 0.0)
    train(model, optimizer, 2)
    before = snapshot(model, optimizer)
    use(optimizer, 0.9)
    refused = r"stepped without exp_avg, .*betas=\(0\.9, 0\.95\)"
    with pytest.raises((ValueError, RuntimeError), match=refused):
        train(model, optimizer, 1, start=2)
    use(optimizer, 0.0)
    after = snapshot(model, optimizer)
    assert all(same_bits(after[name], value) for name, value in before.items())
    train(model, optimizer, 1, start=2)


def test_checkpoints_with_and_without(tmp_path):
    with_first = build("bf16", adam_beta1=0.9)
    without = build("bf16", adam_beta1=0.0)
    for (model, optimizer), folder in ((with_first, "with"), (without, "without")):
        train(model, optimizer, 2)
        checkpoint.save(tmp_path / folder, model, optimizer)
    model, optimizer = build("bf16", adam_beta1=0.0, seed=5)
    with pytest.raises(ValueError, match=r"unexpected .*betas\[0\] is 0; load with convert"):
        checkpoint.load(tmp_path / "with", model, optimizer)
    with pytest.raises(ValueError, match="saved with exp_avg, which is not kept here"):
        optimizer.load_state_dict(with_first[1].state_dict())
    checkpoint.load(tmp_path / "with", model, optimizer, convert=True)
    assert keys(optimizer) == {"exp_avg_sq"}
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    with pytest.raises(ValueError, match="stepped without exp_avg"):
        train(model, optimizer, 1)
    use(optimizer, 0.0)
    train(model, optimizer, 1)
    model, optimizer = build("bf16", adam_beta1=0.9, seed=5)
    with pytest.raises(ValueError, match=r"missing .*betas\[0\] was 0; build"):
        checkpoint.load(tmp_path / "without", model, optimizer, convert=True)
    with pytest.raises(ValueError, match=r"missing \['exp_avg'\]"):
        optimizer.load_state_dict(without[1].state_dict())
    model, optimizer = build("bf16", 1.0, adam_beta1=0.0, seed=5)
    checkpoint.load(tmp_path / "without", model, optimizer)
    train(model, optimizer, 2, start=2)
    train(*without, 2, start=2)
    assert_same_params(model, without[0])


BY = {
    "checkpoint": lambda saved, folder, *pair: checkpoint.load(folder, *pair),
    "state dict": lambda saved, folder, *pair: pair[1].load_state_dict(saved.state_dict()),
    "foreign": lambda saved, folder, *pair: foreign.import_state(
        pair[1], foreign.export_state(saved), convert=True
    ),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Runs with and without a first moment, by betas[0], and where they were saved."""
    runs = {}
    for beta1 in (0.9, 0.0):
        folder = tmp_path_factory.mktemp("saved")
        run = build("bf16", adam_beta1=beta1, adam_beta2=0.95)
        train(*run, 2)
        checkpoint.save(folder, *run)
        ahead = build("bf16", adam_beta1=beta1, adam_beta2=0.95)
        checkpoint.load(folder, *ahead)
        train(*ahead, 2, start=2)
        runs[beta1] = (*run, folder, ahead[0])
    return runs


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("place", ["device", "disk"])
@pytest.mark.parametrize("beta1", [0.9, 0.0])
def test_betas_that_are_set_before_a_load(place, by, beta1, both, tmp_path):
    """They say what state there is to load."""
    model, optimizer = built(place, tmp_path, 0.9 - beta1)
    use(optimizer, beta1)
    saved_model, saved, folder, ahead = both[beta1]
    if by != "foreign":  # which always has a first moment
        before = copy.deepcopy(model)
        with pytest.raises(ValueError, match=r"missing.*exp_avg|not kept|unexpected.*exp_avg"):
            BY[by](*both[0.9 - beta1][1:3], model, optimizer)
        assert optimizer.param_groups[0]["betas"] == (beta1, 0.95)
        assert_same_params(model, before)
    model.load_state_dict(saved_model.state_dict())
    BY[by](saved, folder, model, optimizer)
    train(model, optimizer, 2, start=2)
    assert_same_params(model, ahead)


def test_state_dicts_of_torch_and_back():
    """torch keeps a first moment at betas[0] = 0; it is the last gradient, and nothing reads it."""
    param, other = (nn.Parameter(torch.linspace(-1, 1, 700)) for _ in range(2))
    theirs = torch.optim.AdamW([param], lr=0.01, betas=(0.0, 0.95))
    ours = AdamW([other], lr=0.01, betas=(0.0, 0.95))
    for step in range(6):
        param.grad = torch.linspace(1, -2, 700).mul_(1 + step).sin_()
        other.grad = param.grad.clone()
        theirs.step()
        ours.step()
    torch.testing.assert_close(other, param, rtol=1e-6, atol=1e-7)
    assert list(ours.state_dict()["state"][0]) == ["step", "exp_avg_sq"]
    with pytest.raises(ValueError, match="convert=True, which drops it"):
        ours.load_state_dict(theirs.state_dict())


def test_the_planner_and_describe_count_it():
    model = nn.Linear(64, 64, bias=False).bfloat16()
    fields = {"lr": 0.1, "bf16": True}
    sizes = []
    for beta1 in (0.9, 0.0):
        config = OptimizerConfig(**fields, adam_beta1=beta1)
        optimizer = get_megatron_optimizer(config, model)
        described = sum(row.bytes for row in optimizer.describe().rows)
        sizes.append((plan(model, config).accelerator.moments, described))
    assert sizes[0][0] - sizes[1][0] == sizes[0][1] - sizes[1][1] == 4 * 64 * 64


@pytest.mark.parametrize("precision", ["bf16", EIGHT_BITS])
def test_a_moment_that_stayed_is_zero_after_a_load_of_state_without_one(precision):
    """The moment is stepped on though nothing reads it: not the one from before the load."""
    saved = build(precision, adam_beta1=0.0, adam_beta2=0.95)
    train(*saved, 2)
    model, optimizer = build(precision, adam_beta1=0.5, adam_beta2=0.95, seed=5)
    train(model, optimizer, 3)
    use(optimizer, 0.0)
    model.load_state_dict(saved[0].state_dict())
    optimizer.load_state_dict(saved[1].state_dict())
    states = optimizer.state_dict(full_precision=True)["state"].values()
    assert not any(bool(state["exp_avg"].any()) for state in states)
    train(model, optimizer, 2, start=2)
    train(*saved, 2, start=2)
    assert_same_params(model, saved[0])


@pytest.mark.parametrize("precision", ["bf16", EIGHT_BITS])
def test_a_moment_that_is_dropped_takes_its_scales_along(precision):
    saved = build(precision, adam_beta1=0.5, adam_beta2=0.95)
    train(*saved, 2)
    model, optimizer = build(precision, adam_beta1=0.0, adam_beta2=0.95, seed=5)
    model.load_state_dict(saved[0].state_dict())
    optimizer.load_state_dict(saved[1].state_dict(), convert=True)
    assert keys(optimizer) == {"exp_avg_sq"}
