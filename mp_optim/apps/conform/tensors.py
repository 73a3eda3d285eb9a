"""Checks of tensors: shapes, layouts, replacement, freezing, tying, state, memory, and precision:
bfloat16, float16, loss scales, autocast and default dtypes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim.apps.conform.kit import (
    Make,
    NotApplicable,
    backward,
    filled,
    layers,
    make_or_refuse,
    must,
    noise,
    percent,
    require,
    require_close,
    require_same,
    saved,
    should,
    step_or_refuse,
    tensors_in,
    train,
    trained,
    weights,
)


def steps_of_shape(make: Make, *shape: int) -> None:
    """Step a parameter of a shape together with a matrix. Require that the parameter and the matrix
    move, or that an error is raised."""
    params = [nn.Parameter(noise(6, 8)), nn.Parameter(noise(*shape, seed=1))]
    optimizer = make_or_refuse(make, params)
    before = [param.detach().clone() for param in params]
    for step in range(3):
        for param in params:
            param.grad = noise(*param.shape, seed=step)
        step_or_refuse(optimizer, params)
    for old, new in zip(before, params, strict=True):
        require(
            new.shape == old.shape,
            f"a parameter of {tuple(old.shape)} has shape {tuple(new.shape)} after a step",
        )
        moved = bool((old != new.detach()).any()) or not old.numel()
        require(moved and new.isfinite().all(), f"a parameter of {tuple(old.shape)} is not stepped")


@must()
def vectors_are_stepped(make: Make) -> None:
    """A parameter of one dimension is stepped, or refused."""
    steps_of_shape(make, 5)


@must()
def scalars_are_stepped(make: Make) -> None:
    """A parameter of no dimension, such as a logit scale, is stepped, or refused."""
    steps_of_shape(make)


@must()
def empty_parameters_are_no_harm(make: Make) -> None:
    """A parameter without elements, such as an empty shard, is accepted or refused; steps of
    other parameters do not change."""
    steps_of_shape(make, 0, 4)


@must()
def kernels_of_convolutions_are_stepped(make: Make) -> None:
    """A parameter of four dimensions is stepped, or refused."""
    steps_of_shape(make, 4, 3, 5, 5)


def as_contiguous(make: Make, laid: Callable[[Tensor], Tensor], grad: bool, *shape: int) -> None:
    """Require that training with a parameter or gradient in another memory layout gives the bits of
    training with contiguous tensors."""
    results = []
    for layout in (lambda tensor: tensor, laid):
        param = nn.Parameter(noise(*shape) if grad else layout(noise(*shape)))
        optimizer = make_or_refuse(make, [param])
        for step in range(3):
            gradient = noise(*shape, seed=step + 1)
            param.grad = layout(gradient) if grad else torch.empty_like(param).copy_(gradient)
            step_or_refuse(optimizer, [param])
        results.append(param.detach())
    require_close(results[1], results[0], 1e-6, "against contiguous memory")


@must()
def transposed_parameters_are_stepped_right(make: Make) -> None:
    """A parameter with transposed memory gives the result of a contiguous parameter."""
    as_contiguous(make, lambda tensor: tensor.t().contiguous().t(), False, 12, 8)


@must()
def sliced_parameters_are_stepped_right(make: Make) -> None:
    """A parameter that is a column slice of a larger tensor gives the result of a separate
    parameter."""
    as_contiguous(make, lambda t: torch.cat([t, t], 1)[:, : t.shape[1]], False, 12, 8)


@must()
def transposed_gradients_are_read_right(make: Make) -> None:
    """A gradient with another memory layout than its parameter's is read correctly."""
    as_contiguous(make, lambda tensor: tensor.t().contiguous().t(), True, 12, 8)


@should()
def expanded_gradients_are_read_right(make: Make) -> None:
    """A gradient that repeats one row by a stride of 0 is read correctly."""
    results = []
    for is_expanded in (False, True):
        param = nn.Parameter(noise(12, 8))
        optimizer = make([param])
        for step in range(2):
            row = noise(1, 8, seed=step + 1).expand(12, 8)
            param.grad = row if is_expanded else row.contiguous()
            step_or_refuse(optimizer, [param])
        results.append(param.detach())
    require_close(results[1], results[0], 1e-6, "against a contiguous gradient")


@must()
def channels_last_is_stepped_right(make: Make) -> None:
    """A channels_last kernel gives the result of a contiguous kernel, or is refused."""
    as_contiguous(make, lambda t: t.to(memory_format=torch.channels_last), False, 4, 3, 5, 5)


@must()
def frozen_parameters_stay(make: Make) -> None:
    """A parameter frozen between steps is unchanged, and is trained again when it is unfrozen."""
    model, optimizer = trained(make, 2)
    first = next(model.parameters())
    first.requires_grad_(False)
    before = first.detach().clone()
    train(model, optimizer, 2, 2)
    require_same([first], [before], "the frozen parameter")
    first.requires_grad_(True)
    train(model, optimizer, 1, 4)
    require((first != before).any(), "the parameter is not trained after it is unfrozen")


@must()
def a_replaced_parameter_is_followed(make: Make) -> None:
    """A parameter that a wrapper puts into param_groups is trained, and the replaced parameter
    is not."""
    model, optimizer = trained(make, 1)
    other = layers()
    optimizer.param_groups[0]["params"][:] = list(other.parameters())
    old, before = weights(model), weights(other)
    train(other, optimizer, 2, 1)
    require_same(weights(model), old, "the parameters that were replaced")
    for start, now in zip(before, weights(other), strict=True):
        require((start != now).any(), f"the new parameter of {tuple(now.shape)} is not trained")


@must()
def data_may_be_swapped(make: Make) -> None:
    """A step writes to the new memory after param.data is assigned, as offloading programs do."""
    results = []
    for is_swapped in (False, True):
        model, optimizer = trained(make)
        for step in range(4):
            if is_swapped:
                for param in model.parameters():
                    param.data = param.data.clone()
            train(model, optimizer, 1, step)
        results.append(weights(model))
    require_same(results[1], results[0], "with data in new memory before each step")


@must()
def mixed_dtypes_are_stepped(make: Make) -> None:
    """float32 and bfloat16 parameters in one group are each stepped as in a group of their own,
    or refused."""
    for second in (torch.float32, torch.bfloat16):
        both = [nn.Parameter(noise(12, 8, dtype=dtype)) for dtype in (torch.float32, second)]
        alone = [nn.Parameter(param.detach().clone()) for param in both]
        singles = [make_or_refuse(make, [param]) for param in alone]
        optimizer = make_or_refuse(make, both)
        for step in range(3):
            for param in (*both, *alone):
                param.grad = noise(12, 8, seed=step + 1, dtype=param.dtype)
            for each in singles:
                each.step()
            step_or_refuse(optimizer, both)
        for here, there in zip(both, alone, strict=True):
            apart = float((here.detach() - there.detach()).abs().max())
            if second == torch.float32 and apart > 1e-6:
                raise NotApplicable(
                    "the step of a parameter depends on the other parameters of its group"
                )
            # The two runs may round stochastically, so a difference of two units in the last place
            # is allowed.
            places = 2.0 * torch.finfo(here.dtype).eps
            require_close(here, there, max(1e-5, places), f"{here.dtype} in one group with others")


@should()
def float64_is_stepped_as_such(make: Make) -> None:
    """A step of 1e-9 moves a float64 weight of 1, or float64 is refused."""
    param = nn.Parameter(filled(1.0, 6, 8, dtype=torch.float64))
    optimizer = make_or_refuse(make, [param], lr=1e-9)
    for _ in range(2):
        param.grad = filled(1.0, 6, 8, dtype=torch.float64)
        step_or_refuse(optimizer, [param])
    require((param != 1.0).all(), "the weights are 1 after two steps of 1e-9")


# -- state -----------------------------------------------------------------------------------------


def with_state(make: Make, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the weights after five steps. After the third step, ``change`` replaces every tensor
    of the optimizer's state."""
    model, optimizer = trained(make, 3)
    for param in model.parameters():
        state: dict[str, Any] = optimizer.state[param]
        for key, value in list(state.items()):
            if isinstance(value, Tensor):
                state[key] = change(value)
    train(model, optimizer, 2, 3)
    return weights(model)


@should()
def state_may_be_moved_by_hand(make: Make) -> None:
    """state[p][key] = state[p][key].to(...), as RL programs do, changes no number."""
    moved = with_state(make, lambda value: value.detach().to(value.device, copy=True))
    require_same(moved, with_state(make, lambda value: value), "with state in new memory")


@should()
def state_that_is_assigned_counts(make: Make) -> None:
    """The next step uses tensors that a program assigns to optimizer.state: assigned zeros change
    the step."""
    emptied = with_state(make, lambda value: value * 0 if value.dim() else value)
    untouched = with_state(make, lambda value: value)
    if not any((a != b).any() for a, b in zip(emptied, untouched, strict=True)):
        _, optimizer = trained(make, 1)
        held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        require(not any(v.dim() for v in held), "zeros in all state did not change the next step")


@should()
def state_is_keyed_by_parameters(make: Make) -> None:
    """After a step, optimizer.state[p] is the state of p, and each read returns the same object."""
    model, optimizer = trained(make, 2)
    keys = set(optimizer.state)
    strangers = [key for key in keys if isinstance(key, Tensor)]
    known = set(model.parameters())
    require(all(key in known for key in strangers), "state has keys that are no parameters")
    for param in model.parameters():
        require(
            optimizer.state[param] is optimizer.state[param],
            "optimizer.state returns another object at each read",
        )


# -- memory ----------------------------------------------------------------------------------------


def bytes_of_tensors() -> int:
    """Return the bytes of all live tensors; each storage counts once."""
    gc.collect()
    alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in alive}
    return sum(storages.values())


@must()
def memory_does_not_grow(make: Make) -> None:
    """After the first steps, further steps do not increase allocated memory."""
    model, optimizer = trained(make, 3)
    before = bytes_of_tensors()
    train(model, optimizer, 8, 3)
    grown = bytes_of_tensors() - before
    require(grown <= 4096, f"eight steps left {grown} bytes held")


@should()
def gradients_are_let_go(make: Make) -> None:
    """zero_grad frees the memory of gradients: the optimizer keeps no reference to gradients."""
    model, optimizer = trained(make, 2)
    backward(model, 2)
    held = [weakref.ref(param.grad) for param in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    alive = sum(reference() is not None for reference in held)
    require(not alive, f"{alive} of {len(held)} gradients are alive after zero_grad")


# -- precision -------------------------------------------------------------------------------------


def way(
    make: Make, dtype: torch.dtype, start: float, sizes: list[float], **settings: float
) -> Tensor:
    """Return the change of a weight, in float64, after one step for each gradient in ``sizes``."""
    param = nn.Parameter(filled(start, 16, 16, dtype=dtype))
    optimizer = make_or_refuse(make, [param], **settings)
    for size in sizes:
        param.grad = filled(size, 16, 16, dtype=dtype)
        optimizer.step()
    return param.detach().double() - start


@should()
def bfloat16_weights_move_at_1e_6(make: Make) -> None:
    """64 steps of 1e-6 move a bfloat16 weight of 0.001, although each step is smaller than half
    a unit in the last place."""
    start = float(filled(0.001, dtype=torch.bfloat16))
    sizes = [1.0] * 64
    expected = way(make, torch.float32, start, sizes, lr=1e-6)
    if abs(float(expected.mean())) < 3e-5:
        raise NotApplicable("the optimizer scales steps by the size of weights, not by lr")
    found = way(make, torch.bfloat16, start, sizes, lr=1e-6)
    share = float(found.mean() / expected.mean())
    require(0.5 < share < 1.5, f"the weight moved by {percent(share)} of its float32 step")


@should()
def bfloat16_keeps_its_second_moment(make: Make) -> None:
    """The state of bfloat16 parameters follows gradients that become smaller: the weights' change
    differs from float32's by less than a quarter."""
    sizes = [1.0] * 20 + [0.05] * 300
    expected = way(make, torch.float32, 1.0, sizes, lr=0.01)
    found = way(make, torch.bfloat16, 1.0, sizes, lr=0.01)
    share = float(found.mean() / expected.mean())
    require(0.75 < share < 1.25, f"the weight moved by {percent(share)} of its float32 step")


@should()
def float16_steps_are_finite(make: Make) -> None:
    """Small float16 gradients (1e-5, whose squares underflow) cause finite steps, at most about
    twice as large as float32's."""
    expected = way(make, torch.float32, 1.0, [1e-5] * 2, lr=0.01).abs().max()
    found = way(make, torch.float16, 1.0, [1e-5] * 2, lr=0.01)
    require(found.isfinite().all(), "float16 weights are not finite after two steps")
    off = float(found.abs().max())
    require(
        off <= 2 * float(expected) + 0.002,
        f"weights moved by {off:.3g}, with float32 by {float(expected):.3g}",
    )


@must()
def a_step_without_numbers_is_skipped(make: Make) -> None:
    """With a GradScaler, a step with an inf in a gradient changes no weight and no state, and the
    loss scale decreases."""
    model, optimizer = trained(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    train(model, optimizer, 2)
    before = weights(model)
    state = tensors_in(saved(optimizer)["state"])
    for param in model.parameters():
        param.grad = filled(float("inf"), *param.shape)
    scaler.scale(filled(1.0))
    scaler.step(optimizer)
    scaler.update()
    require_same(weights(model), before, "weights after a step that overflowed")
    require_same(
        tensors_in(optimizer.state_dict()["state"]), state, "state after a step that overflowed"
    )
    require(scaler.get_scale() == 128.0, "the loss scale did not decrease")


@should()
def autocast_does_not_reach_a_step(make: Make) -> None:
    """A step inside autocast gives the same bits as a step outside."""
    results = []
    for enabled in (False, True):
        param = nn.Parameter(noise(24, 16))
        optimizer = make([param])
        for step in range(3):
            param.grad = noise(24, 16, seed=step + 1)
            torch.manual_seed(step)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                optimizer.step()
        results.append(param.detach())
    require_same(results[1:], results[:1], "inside autocast")


@should()
def a_default_dtype_does_not_reach_a_step(make: Make) -> None:
    """torch.set_default_dtype(float64), or bfloat16 while a model is built, changes no number."""
    expected = layers()
    train(expected, make(expected.parameters()), 3)
    for dtype in (torch.float64, torch.bfloat16):
        model = layers()
        standard = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            train(model, make(model.parameters()), 3)
        finally:
            torch.set_default_dtype(standard)
        require_same(weights(model), weights(expected), f"with {dtype} as the default dtype")
