"""Offloading: main params and state are in host memory or in a file, and are stepped there or
copied to the device in windows."""

from mp_optim.offload.buckets import plan_offload
from mp_optim.offload.hybrid import HybridDeviceOptimizer

__all__ = ["HybridDeviceOptimizer", "plan_offload"]
