"""Each conformance check fails for the wrong AdamW that it is written for."""

import pytest

from mp_optim.apps.conform import CHECKS, Subject
from mp_optim.apps.conform.runner import FAILS, OTHER, PASSES, outcome_of
from support.plain_adamw import MUTANTS, built


@pytest.mark.parametrize("mutant", MUTANTS)
def test_conform_check_fails_each_adamw_with_a_known_defect(mutant):
    status, finding = outcome_of(MUTANTS[mutant][0], built(mutant))
    assert status == FAILS and finding


def test_conform_is_tested_with_at_least_40_defective_adamws():
    assert len(MUTANTS) >= 40 and {check for check, _, _ in MUTANTS.values()} <= set(CHECKS)


def test_conform_passes_a_plain_adamw_except_in_six_named_checks():
    checks = Subject("support.plain_adamw.PlainAdamW", rule="adamw").checks()
    outcomes = {check.name: outcome_of(check.name, built())[0] for check in checks}
    assert {name for name, status in outcomes.items() if status not in (PASSES, OTHER)} == {
        "a_loaded_state_is_a_copy",
        "a_state_of_other_shapes_is_refused",
        "asking_for_state_is_no_step",
        "bfloat16_keeps_its_second_moment",
        "bfloat16_weights_move_at_1e_6",
        "float16_steps_are_finite",
    }
