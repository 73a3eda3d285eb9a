"""The optimizer classes of this package pass every conformance check of every level."""

import warnings

import pytest

from mp_optim.apps.conform import CHECKS, Subject
from mp_optim.apps.conform.runner import FAILS, PASSES, REFUSES, outcome_of

FORMS: dict[str, dict[str, object]] = {
    "Adam": {},
    "AdamW": {},
    "Lion": {},
    "SGD": {"momentum": 0.9},
    "Muon": {},
    "LAMB": {},
}
REFUSED = {
    "groups_may_be_reordered",
    "groups_may_be_merged",
    "a_group_may_be_removed",
    "float64_is_stepped_as_such",
}
"""Checks that these classes refuse with an error that names the cure (docs/conformance.md)."""


def outcomes(subject: Subject, names: set[str]) -> dict[str, tuple[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = subject.maker()
        return {name: outcome_of(name, make) for name in CHECKS if name in names}


@pytest.mark.parametrize("name", FORMS)
def test_optimizer_classes_pass_conform_checks_of_every_level(name):
    subject = Subject(f"mp_optim.{name}", FORMS[name])
    found = outcomes(subject, {check.name for check in subject.checks()})
    assert {name: why for name, (status, why) in found.items() if status == FAILS} == {}
    refused = {name for name, (status, _) in found.items() if status == REFUSES}
    assert refused <= REFUSED and {"groups_may_be_merged", "a_group_may_be_removed"} <= refused


@pytest.mark.parametrize(
    "settings",
    [
        {"state": "8bit", "main_params": "remainder16"},
        {"offload": 1.0, "offload_mode": "speculative", "ema_decay": 0.9},
    ],
    ids=str,
)
def test_adamw_passes_conform_checks_with_each_setting(settings):
    subject = Subject("mp_optim.AdamW", settings)
    names = {check.name for check in subject.checks() if not check.rules}
    found = outcomes(subject, names)
    assert {name: why for name, (status, why) in found.items() if status == FAILS} == {}


@pytest.mark.parametrize("state", ["8bit", "4bit"])
@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_optimizers_with_compact_state_keep_weights_when_gradients_are_zero(name, state):
    subject = Subject(f"mp_optim.{name}", {"state": state})
    assert outcomes(subject, {"zero_gradients_move_nothing"}).popitem()[1] == (PASSES, "")


def test_megatron_optimizer_fails_only_known_conform_checks():
    subject = Subject("support.whole_stack.half_on_the_host", rule="adamw")
    found = outcomes(subject, {check.name for check in subject.checks()})
    assert {name for name, (status, _) in found.items() if status == FAILS} == {
        "a_group_may_be_added_later",  # a group without names needs parameters of the model
        "a_group_added_later_steps_as_new",
        "a_deepcopy_goes_on",  # refused: a state dict copies state
    }
    refused = {name for name, (status, _) in found.items() if status == REFUSES}
    other = {"lr_may_be_a_tensor", "float16_steps_are_finite"}
    assert refused - REFUSED == other
