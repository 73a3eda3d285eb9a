"""Checks of any torch optimizer for properties that training programs rely on: ``mp-optim
conform``.

The package imports torch and the checked optimizer, and nothing else of mp_optim.
"""

# Import these modules, because each module registers its checks in CHECKS.
from mp_optim.apps.conform import groups, resume, steps, tensors  # noqa: F401
from mp_optim.apps.conform.kit import CHECKS, Subject
from mp_optim.apps.conform.runner import command_of, run

__all__ = ["CHECKS", "Subject", "command_of", "run"]
