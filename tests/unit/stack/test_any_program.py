"""Any program over the public API leaves what the promises say; ``python tests/lab programs
--minutes N`` tries more."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lab.any_program.machine import AnyProgram


@pytest.mark.repeats
@pytest.mark.timeout(900)  # a program that fails is made shorter first
@pytest.mark.parametrize(("operations", "programs"), [(6, 80), (15, 80), (40, 40)])
def test_any_program_leaves_what_the_promises_say(operations, programs):
    run_state_machine_as_test(
        AnyProgram,
        settings=settings(
            max_examples=programs,
            stateful_step_count=operations,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            print_blob=False,
        ),
    )
