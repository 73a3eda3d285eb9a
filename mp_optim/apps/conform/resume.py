"""Checks of resuming from state dicts (of any time between two steps), and from copies."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mp_optim.apps.conform.kit import (
    Make,
    backward,
    layers,
    make_or_refuse,
    must,
    noise,
    require,
    require_close,
    require_same,
    saved,
    set_rates,
    should,
    tensors_in,
    through_file,
    train,
    trained,
    weights,
)


def resumed_after(make: Make, steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Take six steps in one run, and six steps in a run that is resumed after ``steps``. Require
    equal bits."""
    whole = layers(dtype)
    train(whole, make(whole.parameters()), 6)
    first, optimizer = trained(make, steps, dtype)
    state, second = saved(optimizer), copy.deepcopy(first)
    resumed = make(second.parameters())
    resumed.load_state_dict(state)
    train(second, resumed, 6 - steps, steps)
    require_same(weights(second), weights(whole), f"resumed after step {steps}")


@must()
def resumes_before_the_first_step(make: Make) -> None:
    """A state dict of an optimizer that has not stepped can be loaded, and training does not
    change."""
    resumed_after(make, 0)


@must()
def resumes_after_the_first_step(make: Make) -> None:
    """A run saved after its first step resumes bit for bit."""
    resumed_after(make, 1)


@must()
def resumes_to_the_bit(make: Make) -> None:
    """A run saved after several steps resumes bit for bit."""
    resumed_after(make, 3)


@must()
def resumes_with_bfloat16_parameters(make: Make) -> None:
    """A run with bfloat16 parameters resumes bit for bit; all state keeps its dtype."""
    resumed_after(make, 3, torch.bfloat16)


@must()
def resumes_in_the_middle_of_accumulation(make: Make) -> None:
    """A run that is saved between two micro-batches, together with the first gradients, resumes
    bit for bit."""
    results = []
    for is_saved in (False, True):
        model, optimizer = trained(make, 2)
        optimizer.zero_grad()
        backward(model, 2, 0.5)
        if is_saved:
            gradients = [param.grad for param in model.parameters()]
            state, model = saved(optimizer), copy.deepcopy(model)
            optimizer = make(model.parameters())
            optimizer.load_state_dict(state)
            for param, gradient in zip(model.parameters(), gradients, strict=True):
                param.grad = None if gradient is None else gradient.clone()
        backward(model, 3, 0.5)
        torch.manual_seed(0)
        optimizer.step()
        train(model, optimizer, 2, 4)
        results.append(weights(model))
    require_same(results[1], results[0], "saved between two micro-batches")


@must()
def a_state_loads_over_another(make: Make) -> None:
    """A state that is loaded into an optimizer after further steps restores the bits of the
    saved run."""
    model, optimizer = trained(make, 3)
    state, then = saved(optimizer), copy.deepcopy(model.state_dict())
    train(model, optimizer, 3, 3)
    expected = weights(model)
    model.load_state_dict(then)
    optimizer.load_state_dict(state)
    train(model, optimizer, 3, 3)
    require_same(weights(model), expected, "three steps repeated after loading")


@must()
def what_was_loaded_is_saved_again(make: Make) -> None:
    """A state that is loaded and saved again without a step is unchanged."""
    model, optimizer = trained(make, 3)
    state = saved(optimizer)
    fresh = make(copy.deepcopy(model).parameters())
    fresh.load_state_dict(saved(optimizer))
    again = saved(fresh)
    before, after = tensors_in(state["state"]), tensors_in(again["state"])
    require(len(after) == len(before), f"{len(before)} tensors of state became {len(after)}")
    require_same(after, before, "state that was loaded and saved")


@must()
def settings_are_saved(make: Make) -> None:
    """lr of each group is saved and loaded."""
    model = layers()
    optimizer = make_or_refuse(make, [{"params": [param]} for param in model.parameters()])
    set_rates(optimizer, 0.5)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    train(model, optimizer, 1)
    fresh = make([{"params": [param]} for param in copy.deepcopy(model).parameters()])
    fresh.load_state_dict(saved(optimizer))
    found = [float(group["lr"]) for group in fresh.param_groups]
    require(found == rates, f"lr is {found} after loading, not {rates}")


@must()
def a_state_dict_is_plain_data(make: Make) -> None:
    """torch.load(weights_only=True), the default, reads the state dict."""
    _, optimizer = trained(make, 1)
    saved(optimizer, safely=True)


@should()
def a_loaded_state_is_a_copy(make: Make) -> None:
    """Two optimizers that load one state dict do not write into each other's state."""
    model, optimizer = trained(make, 2)
    state = optimizer.state_dict()
    others = [copy.deepcopy(model) for _ in range(2)]
    copies = [make(other.parameters()) for other in others]
    for each in copies:
        each.load_state_dict(state)
    train(others[0], copies[0], 3, 2)
    train(others[1], copies[1], 3, 2)
    require_same(weights(others[1]), weights(others[0]), "the second optimizer with the state")


@must()
def another_models_state_is_refused(make: Make) -> None:
    """A state with other groups or other numbers of parameters raises, and changes nothing."""
    _, optimizer = trained(make, 2)
    smaller = make(list(layers().parameters())[:1])
    before = tensors_in(saved(optimizer)["state"])
    try:
        optimizer.load_state_dict(saved(smaller))
    except Exception:
        after = tensors_in(optimizer.state_dict()["state"])
        require_same(after, before, "the state after a refused load")
        return
    require(False, "a state of one parameter was loaded into an optimizer of two parameters")


@should()
def a_state_of_other_shapes_is_refused(make: Make) -> None:
    """Loading a state whose tensors have other shapes than the parameters raises."""
    wide, narrow = nn.Parameter(noise(96, 64)), nn.Parameter(noise(64, 72))
    optimizers = [make([wide]), make([narrow])]
    for optimizer, param in zip(optimizers, (wide, narrow), strict=True):
        param.grad = noise(*param.shape, seed=1)
        optimizer.step()
    if not any(tensor.dim() for tensor in tensors_in(optimizers[0].state_dict()["state"])):
        return  # The state has no tensor with dimensions, so there is no shape to refuse.
    try:
        optimizers[1].load_state_dict(saved(optimizers[0]))
    except Exception:
        return
    require(False, "moments of 96 x 64 were loaded for a parameter of 64 x 72")


@must()
def weights_loaded_alone_are_stepped_from(make: Make) -> None:
    """A model that is loaded without its optimizer continues from the loaded weights."""
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = trained(make, 3, dtype)
        other = {name: value * 0 + 3.0 for name, value in model.state_dict().items()}
        model.load_state_dict(other)
        # Set a small rate. With a large rate, a correct optimizer may move weights of 3.0 by more
        # than the limit below.
        set_rates(optimizer, 1e-3)
        train(model, optimizer, 1, 3)
        for now in weights(model):
            off = float((now.float() - 3.0).abs().max())
            require(off < 1.5, f"{dtype}: a step changes loaded weights of 3.0 by {off:.3g}")


@must()
def weights_written_by_hand_are_kept(make: Make) -> None:
    """Weights that a program writes between steps (clamps, swaps, merges) keep their values."""
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = trained(make, 2, dtype)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(2.0)
        set_rates(optimizer, 0.0)
        train(model, optimizer, 1, 2)
        for now in weights(model):
            require_close(now, now * 0 + 2.0, 0.05, f"{dtype}: after a step at lr 0")


@should()
def a_deepcopy_goes_on(make: Make) -> None:
    """copy.deepcopy of a model and its optimizer continues as the original, in its own memory."""
    model, optimizer = trained(make)
    for first in (0, 2):
        other, its_own = copy.deepcopy((model, optimizer))
        train(model, optimizer, 2, first)
        train(other, its_own, 2, first)
        require_same(
            weights(other), weights(model), f"a copy made after {first} steps, two steps later"
        )


@should()
def state_dicts_by_name_resume(make: Make) -> None:
    """get_ and set_optimizer_state_dict of torch.distributed.checkpoint resume bit for bit."""
    first, optimizer = trained(make, 3)
    state, second = get_optimizer_state_dict(first, optimizer), copy.deepcopy(first)
    fresh = make(second.parameters())
    set_optimizer_state_dict(second, fresh, through_file(state))
    train(first, optimizer, 2, 3)
    train(second, fresh, 2, 3)
    require_same(weights(second), weights(first), "two steps after resuming by names")


@should()
def asking_for_state_is_no_step(make: Make) -> None:
    """get_optimizer_state_dict before the first step does not change later steps. torch takes a
    step in that call to create state, and the step must not count."""
    plain, asked = layers(), layers()
    train(plain, make(plain.parameters()), 2)
    optimizer = make(asked.parameters())
    get_optimizer_state_dict(asked, optimizer)
    train(asked, optimizer, 2)
    require_same(
        weights(asked), weights(plain), "after get_optimizer_state_dict before the first step"
    )
