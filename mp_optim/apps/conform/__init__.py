"""What training programs rely on, as checks of any torch optimizer: ``mp-optim conform``.

Stands alone: it imports torch and the optimizer that is checked, and nothing else of this package.
"""

from mp_optim.apps.conform import distributed, groups, precision, resume, steps, tensors
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

SUBJECTS = (steps, resume, groups, tensors, precision, distributed)
"""The modules that checks are in; importing them fills :data:`CHECKS`."""

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
