"""The class to train with, and what it is called with, from a Trainer's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mp_optim.torch_style as ours

OptimizerClass = tuple[type[ours.StackOptimizer], dict[str, Any]]


def class_and_settings(arguments: Any, chosen: Mapping[str, Any]) -> OptimizerClass:
    """What ``Trainer.optimizer_cls_and_kwargs`` takes.

    Args:
        arguments: ``TrainingArguments``: rate, betas and eps are taken from here (Muon's are those
            of its AdamW). Weight decay is in the groups that the Trainer makes.
        chosen: ``optimizer``, the name of a class (``AdamW`` by default), and its settings.

    Raises:
        ValueError: there is no such class.
    """
    settings = dict(chosen)
    name = settings.pop("optimizer", "AdamW")
    if name not in ours.__all__:
        raise ValueError(f"optimizer={name!r}: must be one of {ours.__all__}")
    hyperparameters = {"lr": arguments.learning_rate}
    if name in ("Adam", "AdamW", "StableAdamW", "LAMB", "Muon"):
        hyperparameters["betas"] = (arguments.adam_beta1, arguments.adam_beta2)
        hyperparameters["eps"] = arguments.adam_epsilon
    return getattr(ours, name), {**hyperparameters, **settings}
