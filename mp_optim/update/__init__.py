"""Which rule: those of ``mp_optim.config.rules`` over slots, and the backends that carry them
out."""

from mp_optim.update.adam import FusedAdam, FusedLion, FusedSGD
from mp_optim.update.audit import AuditError, AuditWarning
from mp_optim.update.backends import Backend, check_serves, choose_backend, proof_of
from mp_optim.update.backends.native_library import (
    set_host_cores,
    set_host_threads,
    set_thread_share,
)
from mp_optim.update.measures import global_grad_norm
from mp_optim.update.muon import FusedMuon
from mp_optim.update.optimizer import ForeignExecutor, RuleOptimizer, executor_of
from mp_optim.update.stable_adamw import FusedLAMB

__all__ = [
    "AuditError",
    "AuditWarning",
    "Backend",
    "ForeignExecutor",
    "FusedAdam",
    "FusedLAMB",
    "FusedLion",
    "FusedMuon",
    "FusedSGD",
    "RuleOptimizer",
    "check_serves",
    "choose_backend",
    "executor_of",
    "global_grad_norm",
    "proof_of",
    "set_host_cores",
    "set_host_threads",
    "set_thread_share",
]
