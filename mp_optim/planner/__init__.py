"""How much memory an optimizer will take, before anything is allocated."""

from mp_optim.planner.memory import Layout, Memory, MemoryPlan, ParamSpec, plan, specs_of
from mp_optim.planner.sweep import FORMS, OFFLOADING, SweepRow, form_of, smallest_fraction, sweep

__all__ = [
    "FORMS",
    "OFFLOADING",
    "Layout",
    "Memory",
    "MemoryPlan",
    "ParamSpec",
    "SweepRow",
    "form_of",
    "plan",
    "smallest_fraction",
    "specs_of",
    "sweep",
]
