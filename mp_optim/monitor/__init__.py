"""Observers of a step: options that watch steps, skip steps, or report changed weights.

To add an observer, add a file to this folder and a row to ``OBSERVERS``. The step calls all
observers of this table and names no observer. A method of :class:`~mp_optim.MegatronOptimizer`
finds its observer by the name in the row.
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
"""Observer classes by name. A step calls the observers in this order."""

MegatronOptimizer.observer_kinds = OBSERVERS
