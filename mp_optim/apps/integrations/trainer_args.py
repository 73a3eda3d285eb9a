"""Arguments for a Hugging Face Trainer, and its log of the gradient norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mp_optim.optimizers.classes as ours
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.optimizers import StackOptimizer

OptimizerClass = tuple[type[StackOptimizer], dict[str, Any]]


def class_and_settings(arguments: Any, chosen: Mapping[str, Any]) -> OptimizerClass:
    """Return the value for ``Trainer.optimizer_cls_and_kwargs``.

    Args:
        arguments: ``TrainingArguments``, with learning rate, betas and eps. Muon uses betas and eps
            for its AdamW. The Trainer's param groups have the weight decay.
        chosen: ``optimizer``, the name of a class (``AdamW`` by default), and settings of the
            class.

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
    """Make a Trainer log the optimizer's norm as ``grad_norm`` if ``release_gradients`` is set.

    The Trainer measures gradients before ``step()``, when released gradients are freed already.
    Without ``release_gradients`` the Trainer logs its own norm.

    Args:
        trainer: the Trainer, whose method ``log`` is replaced; call this function before
            ``train()``.
    """
    log = trainer.log

    def with_norm(logs: dict[str, float], *args: Any, **named: Any) -> None:
        prepared = trainer.optimizer
        # accelerate wraps the optimizer, so the stack may be one level deeper.
        inner = getattr(prepared, "optimizer", prepared)
        stack = getattr(inner, "stack", inner)
        is_ours = isinstance(stack, MegatronOptimizer)
        if "grad_norm" in logs and is_ours and stack.config.release_gradients:
            logs = {**logs, "grad_norm": stack.metrics()["grad_norm"]}
        log(logs, *args, **named)

    trainer.log = with_norm
