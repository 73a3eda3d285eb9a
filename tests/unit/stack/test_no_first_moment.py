"""Adam with ``betas[0]`` = 0 keeps no first moment: the bits are those of one that does."""

import pytest

from mp_optim import checkpoint
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


@pytest.mark.parametrize("precision", ["bf16", EIGHT_BITS])
def test_moment_that_stayed_is_zero_after_a_load_of_state_without_one(precision):
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
def test_moment_that_is_dropped_takes_its_scales_along(precision):
    saved = build(precision, adam_beta1=0.5, adam_beta2=0.95)
    train(*saved, 2)
    model, optimizer = build(precision, adam_beta1=0.0, adam_beta2=0.95, seed=5)
    model.load_state_dict(saved[0].state_dict())
    optimizer.load_state_dict(saved[1].state_dict(), convert=True)
    assert keys(optimizer) == {"exp_avg_sq"}
