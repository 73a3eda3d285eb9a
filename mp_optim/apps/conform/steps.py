"""Checks of steps: formulas, counts, gradients, closures and hooks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim.apps.conform.kit import (
    Make,
    backward,
    filled,
    layers,
    make_or_refuse,
    must,
    noise,
    plain,
    require,
    require_close,
    require_same,
    set_rates,
    should,
    train,
    trained,
    weights,
)


def adam_steps(
    start: Tensor,
    gradients: Sequence[Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    eps_before_correction: bool = False,
) -> Tensor:
    """Return the weights of Adam (Kingma & Ba 2015) without decay, in float64.

    Args:
        start: weights before the first step.
        gradients: one gradient for each step.
        lr: learning rate.
        betas: decay per step of the first and second moment.
        eps: number added to the root of the second moment.
        eps_before_correction: True to add ``eps`` before the bias correction (section 2 of the
            paper).
    """
    param = start.detach().double().clone()
    mean, square = param * 0, param * 0
    for count, gradient in enumerate(gradients, 1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient.double()
        square = betas[1] * square + (1 - betas[1]) * gradient.double().square()
        left, right = 1 - betas[0] ** count, 1 - betas[1] ** count
        root = square.sqrt()
        below = (root + eps) / right**0.5 if eps_before_correction else (root / right**0.5) + eps
        param -= lr * (mean / left) / below
    return param


def take_steps(
    make: Make, start: Tensor, gradients: Sequence[Tensor | None], **settings: Any
) -> Tensor:
    """Step one parameter with the given gradients, and return its weights. None stands for no
    gradient."""
    param = nn.Parameter(start.clone())
    optimizer = make([param], **settings)
    for gradient in gradients:
        param.grad = None if gradient is None else gradient.clone()
        optimizer.step()
    return param.detach()


def steps_of_adam(
    make: Make, start: Tensor, gradients: Sequence[Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """Return the weights of the optimizer and of Adam's formula after steps without decay."""
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": eps}
    found = take_steps(plain(make), start, gradients, **settings, weight_decay=0.0)
    return found, adam_steps(start, gradients, **settings)


@must("adam", "adamw")
def first_step_follows_adam(make: Make) -> None:
    """The first step moves each element by lr, because both moments are bias-corrected."""
    start, gradient = noise(8, 12), noise(8, 12, seed=1) * 10.0
    found, expected = steps_of_adam(make, start, [gradient], 1e-8)
    require_close(found, expected, 2e-6, "after the first step")


@must("adam", "adamw")
def ten_steps_follow_adam(make: Make) -> None:
    """Ten steps with changing gradients follow the formula, within 2 % for compact state."""
    start = noise(8, 12)
    gradients = [noise(8, 12, seed=step) * (1.0 + step % 3) for step in range(10)]
    found, expected = steps_of_adam(make, start, gradients, 1e-8)
    error = float((found.double() - expected).norm() / (expected - start.double()).norm())
    require(
        error < 0.02, f"after ten steps the weights are off by {100 * error:.3g} % of their change"
    )


@must("adam", "adamw")
def eps_is_outside_the_root(make: Make) -> None:
    """eps is added to the root of the second moment, before or after its bias correction."""
    start = noise(8, 12)
    gradients = [noise(8, 12, seed=step) * 1e-3 for step in range(2)]
    found, torchs = steps_of_adam(make, start, gradients, 1e-3)
    papers = adam_steps(start, gradients, 0.01, (0.8, 0.9), 1e-3, eps_before_correction=True)
    ways = [torchs, papers]
    off = min(float((found.double() - way).abs().max()) for way in ways)
    require(off <= 2e-6, f"with gradients of the size of eps, steps of 0.01 are {off:.3g} off")


@should("adam", "adamw")
def eps_is_added_after_bias_correction(make: Make) -> None:
    """eps is added after the second moment's bias correction, as torch does."""
    start = noise(8, 12)
    gradients = [noise(8, 12, seed=step) * 1e-3 for step in range(2)]
    found, expected = steps_of_adam(make, start, gradients, 1e-3)
    require_close(found, expected, 2e-6, "with gradients of the size of eps")


@must("adamw", "lion")
def decay_is_decoupled(make: Make) -> None:
    """With a zero gradient, a weight decays by lr * weight_decay of itself."""
    start = noise(8, 12)
    found = take_steps(plain(make), start, [start * 0], lr=0.1, weight_decay=0.5)
    require_close(found, start * (1 - 0.1 * 0.5), 1e-6, "after a step of decay alone")


@must("adam")
def decay_is_part_of_the_gradient(make: Make) -> None:
    """Adam adds weight decay to the gradient. So a step with a zero gradient moves each weight by
    lr."""
    start = noise(8, 12)
    found = take_steps(plain(make), start, [start * 0], lr=0.01, weight_decay=0.5)
    require_close(found, start - 0.01 * start.sign(), 1e-5, "after a step of decay alone")


@must("sgd")
def steps_follow_sgd(make: Make) -> None:
    """SGD with momentum follows torch's formula: the first gradient has full weight."""
    start = noise(8, 12)
    gradients = [noise(8, 12, seed=step) for step in range(4)]
    found = take_steps(plain(make), start, gradients, lr=0.01, momentum=0.9, weight_decay=0.1)
    param, buffer = start.double(), start.double() * 0
    for gradient in gradients:
        buffer = 0.9 * buffer + gradient.double() + 0.1 * param
        param = param - 0.01 * buffer
    require_close(found, param, 2e-6, "after four steps")


@must("lion")
def steps_follow_lion(make: Make) -> None:
    """Lion follows its paper: a step moves weights by the sign of one average, and stores
    another average."""
    start = noise(8, 12)
    gradients = [noise(8, 12, seed=step) for step in range(4)]
    found = take_steps(make, start, gradients, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    param, mean = start.double(), start.double() * 0
    for gradient in gradients:
        direction = (0.8 * mean + 0.2 * gradient.double()).sign()
        param = param * (1 - 0.01 * 0.1) - 0.01 * direction
        mean = 0.9 * mean + 0.1 * gradient.double()
    require_close(found, param, 2e-6, "after four steps")


@must("adam", "adamw", "sgd", "lion")
def zero_gradients_move_nothing(make: Make) -> None:
    """Without weight decay, elements whose gradients are zero keep their values, even if other
    elements of the parameter have large and small gradients."""
    start, is_used = noise(64, 128), noise(64, 128, seed=1) > 0.0
    sizes = torch.logspace(-6, 2, 128, dtype=torch.float32, device="cpu")
    gradients = [noise(64, 128, seed=step) * sizes * is_used for step in range(20)]
    found = take_steps(plain(make), start, gradients, lr=0.01, weight_decay=0.0)
    require_same([found * ~is_used], [start * ~is_used], "elements with gradients of zero")


@must("adam", "adamw", "sgd", "lion")
def a_late_parameter_is_stepped_as_a_new_one(make: Make) -> None:
    """A parameter whose first gradient comes at step 5 is stepped as a new parameter is at its
    first step."""
    early, late = nn.Parameter(noise(4, 6)), nn.Parameter(noise(4, 6, seed=1))
    optimizer = make([early, late], lr=0.01, weight_decay=0.0)
    for step in range(5):
        early.grad = noise(4, 6, seed=step)
        late.grad = noise(4, 6, seed=9) if step == 4 else None
        optimizer.step()
    alone = take_steps(make, noise(4, 6, seed=1), [noise(4, 6, seed=9)], lr=0.01, weight_decay=0.0)
    require_close(late, alone, 1e-6, "the first step of a late parameter, against a new optimizer")


@must("adam", "adamw", "sgd", "lion")
def steps_without_a_gradient_do_not_count(make: Make) -> None:
    """A parameter that has no gradient in three steps continues as if these steps had not been
    taken."""
    given = [noise(4, 6, seed=step) for step in range(2)]
    with_gap = [given[0], None, None, None, given[1]]
    settings = {"lr": 0.01, "weight_decay": 0.1}
    start = noise(4, 6, seed=5)
    found = take_steps(make, start, with_gap, **settings)
    require_close(
        found, take_steps(make, start, given, **settings), 1e-6, "after steps without a gradient"
    )


@must()
def no_gradient_is_no_step(make: Make) -> None:
    """A parameter without a gradient is unchanged, also by weight decay, while other parameters are
    stepped."""
    used, unused = nn.Parameter(noise(4, 6)), nn.Parameter(noise(4, 6, seed=1))
    optimizer = make([used, unused])
    for step in range(3):
        used.grad = noise(4, 6, seed=step)
        optimizer.step()
    require_same([unused], [noise(4, 6, seed=1)], "the parameter without gradient")
    require(
        not torch.equal(used.detach(), noise(4, 6)), "the parameter with a gradient did not move"
    )


@must()
def every_parameter_is_stepped(make: Make) -> None:
    """One step moves every parameter that has a gradient, and all results are finite."""
    model = layers()
    before = weights(model)
    train(model, make(model.parameters()), 2)
    for old, new in zip(before, weights(model), strict=True):
        require(not torch.equal(old, new), f"a parameter of {tuple(old.shape)} did not move")
        require(new.isfinite().all(), f"a parameter of {tuple(old.shape)} is not finite")


@must()
def the_rate_is_read_at_each_step(make: Make) -> None:
    """A new lr of a param group applies from the next step on; at lr=0 no parameter moves."""
    model, optimizer = trained(make)
    held = optimizer.param_groups
    train(model, optimizer, 2)
    before = weights(model)
    for group in held:
        group["lr"] = group["lr"] * 0.0
    train(model, optimizer, 1, 2)
    require_same(weights(model), before, "stepped at lr = 0")


@must()
def a_warm_up_from_zero_is_harmless(make: Make) -> None:
    """A first step at lr=0, as in schedules with a warm-up, leaves finite weights unchanged."""
    model, optimizer = trained(make)
    before, rates = weights(model), [group["lr"] for group in optimizer.param_groups]
    set_rates(optimizer, 0.0)
    train(model, optimizer, 1)
    require_same(weights(model), before, "stepped at lr = 0")
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    train(model, optimizer, 2, 1)
    require(
        all(w.isfinite().all() for w in weights(model)),
        "the weights are not finite after the warm-up",
    )


@must()
def a_step_writes_in_place(make: Make) -> None:
    """A step keeps the same leaf tensors in the same memory, without a graph."""
    model = layers()
    params = list(model.parameters())
    memory = [param.data_ptr() for param in params]
    train(model, make(params), 2)
    require(
        memory == [param.data_ptr() for param in params],
        "a parameter has other memory after the step",
    )
    for param in params:
        require(param.is_leaf and param.requires_grad, "a parameter is no longer a trainable leaf")


@should()
def a_step_is_seen_by_autograd(make: Make) -> None:
    """A step increases each parameter's version, so a backward through old values raises."""
    model, optimizer = trained(make, 1)
    before = [param._version for param in model.parameters()]
    backward(model, 1)
    optimizer.step()
    after = [param._version for param in model.parameters()]
    unseen = [index for index in range(len(after)) if after[index] == before[index]]
    require(not unseen, f"parameters {unseen} were written without a new version")


@must()
def zero_grad_clears(make: Make) -> None:
    """zero_grad removes gradients, or with set_to_none=False fills them with zeros."""
    model, optimizer = trained(make)
    # Test before and after the first step, because some optimizers build state in that step.
    for _ in range(2):
        backward(model, 0)
        optimizer.zero_grad(set_to_none=False)
        kept = [param.grad for param in model.parameters()]
        require(
            all(g is None or not g.any() for g in kept),
            "zero_grad(set_to_none=False) leaves numbers",
        )
        backward(model, 0)
        optimizer.zero_grad()
        require(all(p.grad is None for p in model.parameters()), "zero_grad() leaves gradients")
        train(model, optimizer, 1)


@should()
def gradients_are_left_alone(make: Make) -> None:
    """A step does not change gradients, because programs log, average and reuse them."""
    decays = "weight_decay" in make(layers().parameters()).param_groups[0]
    for settings in ({}, {"weight_decay": 0.1}) if decays else ({},):
        model = layers()
        optimizer = make(model.parameters(), **settings)
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step)
            before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
            optimizer.step()
            after = [param.grad for param in model.parameters() if param.grad is not None]
            require(len(after) == len(before), "the step removed gradients")
            require_same(after, before, f"the gradients after step {step + 1}, {settings}")


@must()
def a_closure_is_called_and_its_loss_returned(make: Make) -> None:
    """step(closure) calls the closure with gradients enabled, and returns the closure's loss."""
    model = layers()
    optimizer, enabled = make(model.parameters()), []

    def closure() -> Tensor:
        enabled.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        backward(model, 0)
        return filled(7.0)

    before = weights(model)
    # Take two steps, because the first step of some methods only initializes statistics.
    for _ in range(2):
        enabled.clear()
        returned = optimizer.step(closure)  # type: ignore[arg-type]
        require(enabled, "the closure was not called")
        require(all(enabled), "the closure was called with gradients disabled")
        require(
            returned is not None and float(returned) == 7.0,
            f"step returned {returned}, not the loss 7.0",
        )
    require(not torch.equal(weights(model)[0], before[0]), "two steps did not change the weights")


@should()
def hooks_run(make: Make) -> None:
    """torch.optim's hooks run: before and after a step, a state dict and a load."""
    model, seen = layers(), list[str]()
    optimizer = make(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("saves"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("loads"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    expected = ["before", "after", "saves", "saved", "loads", "loaded"]
    require(seen == expected, f"the hooks that ran are {seen}, not {expected}")


@should("adam", "adamw", "sgd", "lion")
def a_nan_stays_where_it_is(make: Make) -> None:
    """A NaN or inf in one element of a gradient does not change the steps of other elements, or the
    whole step is skipped."""
    start, gradient = noise(8, 12), noise(8, 12, seed=1)
    clean = take_steps(make, start, [gradient])
    for bad in (math.nan, math.inf):
        spoilt = gradient.clone()
        spoilt[3, 5] = bad
        found = take_steps(make, start, [spoilt])
        if torch.equal(found, start):
            continue
        found[3, 5] = clean[3, 5]
        require_same([found], [clean], f"elements next to a gradient of {bad}")


@should()
def lr_may_be_a_tensor(make: Make) -> None:
    """lr as a tensor, as in compiled programs, gives the same step as a number, or is refused."""
    results = []
    for rate in (0.01, filled(0.01)):
        model = layers()
        optimizer = make_or_refuse(make, model.parameters(), lr=rate)
        train(model, optimizer, 3)
        results.append(weights(model))
    for number, tensor in zip(*results, strict=True):
        require_close(tensor, number, 1e-5, "after three steps with a tensor for lr")
