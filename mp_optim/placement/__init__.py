"""Which device: where each parameter is stepped and how its data gets there and back."""

from mp_optim.placement.hybrid import HybridDeviceOptimizer
from mp_optim.placement.plan import plan_offload

__all__ = ["HybridDeviceOptimizer", "plan_offload"]
