"""Which rule: Adam, StableAdamW, LAMB, SGD, Lion, Adafactor, Muon over slots, and the backends that
carry them out."""

from mp_optim.update.adam import FusedAdam
from mp_optim.update.backends import Backend, check_serves, choose_backend, proof_of
from mp_optim.update.backends.host_threads import (
    set_host_cores,
    set_host_threads,
    set_thread_share,
)
from mp_optim.update.foreign import ForeignOptimizer, as_slot_optimizer
from mp_optim.update.grad_norm import global_grad_norm
from mp_optim.update.lamb import FusedLAMB
from mp_optim.update.lion import Lion
from mp_optim.update.muon import Muon
from mp_optim.update.rule import RuleOptimizer
from mp_optim.update.sgd import SGD

__all__ = [
    "SGD",
    "Backend",
    "ForeignOptimizer",
    "FusedAdam",
    "FusedLAMB",
    "Lion",
    "Muon",
    "RuleOptimizer",
    "as_slot_optimizer",
    "check_serves",
    "choose_backend",
    "global_grad_norm",
    "proof_of",
    "set_host_cores",
    "set_host_threads",
    "set_thread_share",
]
