"""Observers of a step: options that watch, judge or publish steps.

A row of ``OBSERVERS`` and a file of this folder make an observer; nothing in a step names one.
Methods of :class:`~mp_optim.MegatronOptimizer` find theirs by its name.
"""

from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.mixed_precision.observer import Observer
from mp_optim.monitor.averaged_weights import AveragedWeights
from mp_optim.monitor.changed_weights import ChangedWeights
from mp_optim.monitor.health import GradientHealth
from mp_optim.monitor.skip_rule import SkipRule
from mp_optim.monitor.step_warnings import StepWarnings

OBSERVERS: dict[str, type[Observer]] = {
    "skip_rule": SkipRule,
    "health": GradientHealth,
    "step_warnings": StepWarnings,
    "averaged_weights": AveragedWeights,
    "changed_weights": ChangedWeights,
}
"""Observers by name, in the order in which a step calls them."""

MegatronOptimizer.observer_kinds = OBSERVERS
