"""Optimizer callback for ms-swift: ``--optimizer mp_optim --optim_args "offload=1.0,state=8bit"``.

One of the files in ``--external_plugins`` must import this module.
"""

from __future__ import annotations

import ast
from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map

from mp_optim.apps.integrations.trainer_args import class_and_settings, log_own_norm


class MpOptimCallback(OptimizerCallback):  # type: ignore[misc]
    """Callback that trains with a class of :mod:`mp_optim.optimizers`.

    ``optimizer=`` in ``--optim_args`` names the class (``AdamW`` by default). Learning rate, betas,
    eps and weight decay come from ms-swift.
    """

    def create_optimizer(self, model: Any = None) -> Any:
        chosen = settings_of(self.args.optim_args or "")
        self.trainer.optimizer_cls_and_kwargs = class_and_settings(self.args, chosen)
        log_own_norm(self.trainer)
        return super().create_optimizer(model)


def settings_of(text: str) -> dict[str, Any]:
    """Return the names and values of text such as "offload=1.0,state=8bit".

    A value that is not a Python literal is a string.

    Raises:
        ValueError: an item between commas is not name=value.
    """
    settings: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"optim_args={part!r}: the equals sign is missing; write name=value")
        try:
            settings[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            settings[name] = value
    return settings


optimizers_map["mp_optim"] = MpOptimCallback
