"""Which device: where each parameter is stepped and how its data gets there and back."""

from mp_optim.offload.buckets import plan_offload
from mp_optim.offload.hybrid import HybridDeviceOptimizer

__all__ = ["HybridDeviceOptimizer", "plan_offload"]
