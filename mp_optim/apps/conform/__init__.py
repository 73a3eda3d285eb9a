"""Checks of any torch optimizer for properties that training programs rely on: ``mp-optim
conform``.

The package imports torch and the checked optimizer, and nothing else of mp_optim.
"""

from mp_optim.apps.conform import groups, precision, resume, steps, tensors
from mp_optim.apps.conform.kit import (
    CHECKS,
    LEVELS,
    Check,
    Nonconformance,
    NotApplicable,
    Refused,
    Subject,
)
from mp_optim.apps.conform.runner import Outcome, command_of, run

SUBJECTS = (steps, resume, groups, tensors, precision)
"""Modules that define checks. Importing these modules fills :data:`CHECKS`."""

__all__ = [
    "CHECKS",
    "LEVELS",
    "SUBJECTS",
    "Check",
    "Nonconformance",
    "NotApplicable",
    "Outcome",
    "Refused",
    "Subject",
    "command_of",
    "run",
]
