"""Backends: implementations of the rules' arithmetic for a device, behind one interface."""

from mp_optim.kernels.reference import Backend
from mp_optim.kernels.selection import check_serves, choose_backend, forget, proof_of
from mp_optim.kernels.self_test import SelfTest

__all__ = ["Backend", "SelfTest", "check_serves", "choose_backend", "forget", "proof_of"]
