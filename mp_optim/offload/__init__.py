"""Offloading: the device that steps each parameter, and the copies of its data to and from that
device."""

from mp_optim.offload.buckets import plan_offload
from mp_optim.offload.hybrid import HybridDeviceOptimizer

__all__ = ["HybridDeviceOptimizer", "plan_offload"]
