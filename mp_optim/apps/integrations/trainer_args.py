"""Arguments for a Hugging Face Trainer: the optimizer class and its settings, from the Trainer's
arguments; and the norm of gradients that the Trainer does not see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mp_optim.optimizers.classes as ours
from mp_optim.core.keyed_optimizer import stack_of
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.optimizers import StackOptimizer

OptimizerClass = tuple[type[StackOptimizer], dict[str, Any]]


def class_and_settings(arguments: Any, chosen: Mapping[str, Any]) -> OptimizerClass:
    """Return the value for ``Trainer.optimizer_cls_and_kwargs``.

    Args:
        arguments: ``TrainingArguments``, with learning rate, betas and eps (for Muon those of its
            AdamW). Weight decay is in the groups that the Trainer makes.
        chosen: ``optimizer``, the name of a class (``AdamW`` by default), and its settings.

    Raises:
        ValueError: the class does not exist.
    """
    settings = dict(chosen)
    name = settings.pop("optimizer", "AdamW")
    if name not in ours.__all__:
        raise ValueError(f"optimizer={name!r}: must be one of {ours.__all__}")
    hyperparameters = {"lr": arguments.learning_rate}
    if name in ("Adam", "AdamW", "LAMB", "Muon"):
        hyperparameters["betas"] = (arguments.adam_beta1, arguments.adam_beta2)
        hyperparameters["eps"] = arguments.adam_epsilon
    return getattr(ours, name), {**hyperparameters, **settings}


def log_own_norm(trainer: Any) -> None:
    """Make a Trainer log the norm of its last step as ``grad_norm`` if gradients leave the device
    during backward (``release_gradients``). The Trainer measures before ``step()``, when they
    are gone. Otherwise it logs its own norm.

    Args:
        trainer: the Trainer, whose method ``log`` is replaced; call this before ``train()``.
    """
    log = trainer.log

    def with_norm(logs: dict[str, float], *args: Any, **named: Any) -> None:
        prepared = trainer.optimizer
        stack = stack_of(getattr(prepared, "optimizer", prepared))  # below accelerate's wrapper
        is_ours = isinstance(stack, MegatronOptimizer)
        if "grad_norm" in logs and is_ours and stack.config.release_gradients:
            logs = {**logs, "grad_norm": stack.metrics()["grad_norm"]}
        log(logs, *args, **named)

    trainer.log = with_norm
