"""What carries a rule out on a device, behind one interface."""

from mp_optim.update.backends.interface import Backend
from mp_optim.update.backends.proof import Proof
from mp_optim.update.backends.selection import (
    check_forms,
    check_serves,
    choose_backend,
    forget,
    proof_of,
    rule_note,
)

__all__ = [
    "Backend",
    "Proof",
    "check_forms",
    "check_serves",
    "choose_backend",
    "forget",
    "proof_of",
    "rule_note",
]
