"""How much memory an optimizer will take, before anything is allocated."""

from mp_optim.planner.layout import Layout
from mp_optim.planner.memory import Memory, MemoryPlan, plan
from mp_optim.planner.params import ParamSpec, specs_of
from mp_optim.planner.sweep import (
    FORMS,
    OFFLOADING,
    SweepRow,
    form_of,
    smallest_fraction,
    sweep,
)

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
