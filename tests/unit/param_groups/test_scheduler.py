import math
import warnings
import weakref

import pytest
import torch
from torch import nn

from mp_optim import OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer

BASE = {
    "init_lr": 0.1,
    "max_lr": 1.0,
    "min_lr": 0.2,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 110,
    "lr_decay_style": "cosine",
    "start_wd": 0.0,
    "end_wd": 0.1,
    "wd_incr_steps": 100,
    "wd_incr_style": "linear",
}


class Holder:
    def __init__(self, *groups):
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0, **group} for group in groups or ({},)]


def at(steps, **settings):
    holder = Holder()
    OptimizerParamScheduler(holder, **{**BASE, **settings}).step(steps)
    return holder.param_groups[0]


@pytest.mark.parametrize(
    "style, steps, expected",
    [
        ("cosine", 0, 0.1),
        ("cosine", 5, 0.55),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.6),
        ("cosine", 110, 0.2),
        ("cosine", 500, 0.2),
        ("linear", 35, 0.8),
        ("constant", 500, 1.0),
        ("inverse-square-root", 40, 0.5),
        ("inverse-square-root", 109, math.sqrt(10 / 109)),
    ],
)
def test_scheduler_returns_the_lr_of_each_decay_style_at_each_step(style, steps, expected):
    assert at(steps, lr_decay_style=style)["lr"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "style, middle",
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * 0.5**0.5 - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_scheduler_lr_is_flat_and_then_decays_in_wsd_styles(style, middle):
    settings = {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": style}
    assert at(80, **settings)["lr"] == 1.0
    assert at(100, **settings)["lr"] == pytest.approx(0.2 + 0.8 * middle)
    assert at(110, **settings)["lr"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    "style, expected", [("linear", 0.025), ("cosine", 0.05 * (1 - math.cos(math.pi / 4)))]
)
def test_scheduler_increases_weight_decay_along_the_chosen_ramp(style, expected):
    assert at(25, wd_incr_style=style)["weight_decay"] == pytest.approx(expected)
    assert at(1000, wd_incr_style=style)["weight_decay"] == 0.1


def test_scheduler_applies_limits_of_each_group_and_writes_tensor_rates_in_place():
    rate = torch.zeros(())
    holder = Holder(
        {"max_lr": 2.0, "min_lr": 0.5, "wd_mult": 0.0},
        {"lr_mult": 0.5, "end_wd": 0.4},
        {"lr": rate},
    )
    OptimizerParamScheduler(holder, **BASE).step(1000)
    first, second, third = holder.param_groups
    assert (first["lr"], first["weight_decay"]) == (0.5, 0.0)
    assert (second["lr"], second["weight_decay"]) == (pytest.approx(0.1), pytest.approx(0.4))
    assert third["lr"] is rate and float(rate) == pytest.approx(0.2)


def test_scheduler_load_sets_step_and_rates_alike_when_called_once_or_twice():
    scheduler = OptimizerParamScheduler(Holder(), **BASE)
    scheduler.step(30)
    state = scheduler.state_dict()
    holder = Holder()
    other = OptimizerParamScheduler(holder, **BASE)
    other.load_state_dict(state)
    other.load_state_dict(state)
    assert other.num_steps == 30 and other.state_dict() == state
    assert holder.param_groups == scheduler.optimizer.param_groups


def test_scheduler_refuses_a_state_with_other_settings_when_no_flag_is_set():
    state = OptimizerParamScheduler(Holder(), **{**BASE, "max_lr": 3.0}).state_dict()
    scheduler = OptimizerParamScheduler(Holder(), **BASE, use_checkpoint_opt_param_scheduler=False)
    with pytest.raises(ValueError, match=r"max_lr=1\.0: the checkpoint has 3\.0"):
        scheduler.load_state_dict(state)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_decay_style": "cosin"},
        {"wd_incr_style": "x"},
        {"min_lr": 2.0},
        {"init_lr": 2.0},
        {"lr_warmup_steps": 200},
        {"end_wd": -1.0},
        {"wsd_decay_steps": 500, "lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"},
        {"lr_wsd_decay_style": "x", "lr_decay_style": "WSD", "wsd_decay_steps": 10},
    ],
)
def test_scheduler_names_the_argument_when_a_setting_is_invalid(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        at(0, **settings)


def stage(top, floor, **flags):
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(4, 4), "hidden": nn.Linear(4, 4)})
    config = OptimizerConfig(lr=top, min_lr=floor, decoupled_lr=7.0, decoupled_min_lr=0.0)
    optimizer = get_megatron_optimizer(config, model)
    settings = {**BASE, "init_lr": 0.0, "max_lr": top, "min_lr": floor, "lr_warmup_steps": 0}
    return optimizer, OptimizerParamScheduler(optimizer, **settings, **flags)


def rates(optimizer):
    found = {bool(group["is_decoupled_lr"]): group["lr"] for group in optimizer.param_groups}
    return found[False], found[True]


@pytest.mark.parametrize("order", ["O", "S", "OS", "SO"])
@pytest.mark.parametrize("whose", ["new", "saved"])
def test_scheduler_rates_follow_the_override_flag_for_any_order_of_loads(order, whose):
    first, saved = stage(6.0, 0.5)
    saved.step(40)
    flag = {"new": "override_opt_param_scheduler", "saved": "use_checkpoint_opt_param_scheduler"}
    optimizer, scheduler = stage(2.0, 1.0, **{flag[whose]: True})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for what in order:
            if what == "O":
                optimizer.load_state_dict(first.state_dict())
            else:
                scheduler.load_state_dict(saved.state_dict())
    top, floor = {"new": (2.0, 1.0), "saved": (6.0, 0.5)}[whose]
    assert scheduler.num_steps == (40 if "S" in order else 0)
    if whose == "new":  # The first step after a load already has the right rate.
        assert not told and rates(optimizer) == tuple(map(scheduler.get_lr, limits(2.0, 1.0)))
    else:
        assert f"max_lr={top!r}" in str(told[0].message) and "override_" in str(told[0].message)
    scheduler.step()
    expected, embedding = map(scheduler.get_lr, limits(top, floor))
    assert rates(optimizer) == (expected, embedding)


def limits(top, floor):
    return {"max_lr": top, "min_lr": floor}, {"max_lr": 7.0, "min_lr": 0.0}


def test_scheduler_load_names_groups_that_keep_a_different_max_lr():
    state = OptimizerParamScheduler(Holder(), **{**BASE, "max_lr": 3.0}).state_dict()
    holder = Holder({"max_lr": 1.0}, {"max_lr": 0.5})
    scheduler = OptimizerParamScheduler(holder, **BASE)
    with pytest.warns(
        UserWarning, match=r"max_lr=3\.0 \(1\.0 here\).* max_lr=0\.5 of param group 1"
    ):
        scheduler.load_state_dict(state)
    assert [group["max_lr"] for group in holder.param_groups] == [3.0, 0.5]


def test_deleted_scheduler_leaves_no_hook_on_the_optimizer():
    optimizer, scheduler = stage(2.0, 1.0)
    gone = weakref.ref(scheduler)
    del scheduler
    assert gone() is None and not optimizer._optimizer_load_state_dict_post_hooks


def test_scheduler_warns_when_no_group_follows_max_lr():
    with pytest.warns(UserWarning, match=r"max_lr=1\.0 has no effect"):
        OptimizerParamScheduler(Holder({"max_lr": 5.0}, {"max_lr": 3.0}), **BASE)
