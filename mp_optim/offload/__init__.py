"""Offloading: main params and state are stored in host memory or in a file. The host steps them, or
the device steps them in windows that are copied to it."""

from mp_optim.offload.buckets import plan_offload
from mp_optim.offload.hybrid import HybridDeviceOptimizer

__all__ = ["HybridDeviceOptimizer", "plan_offload"]
