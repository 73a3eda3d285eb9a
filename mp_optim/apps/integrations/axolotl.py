"""Plugin for axolotl.

Add ``plugins: [mp_optim.apps.integrations.axolotl.MpOptimPlugin]`` to the YAML, and the optimizer's
settings below ``mp_optim:``.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from mp_optim.apps.integrations.trainer_args import class_and_settings, log_own_norm


class MpOptimArgs(BaseModel):
    """Fields that the plugin adds to axolotl's YAML."""

    mp_optim: dict[str, Any] = {}
    """``optimizer``, the name of a class of :mod:`mp_optim.optimizers` (``AdamW`` by default), and
    its settings, such as ``offload: 1.0`` and ``state: 8bit``."""


class MpOptimPlugin(BasePlugin):  # type: ignore[misc]
    """Plugin that trains with a class of :mod:`mp_optim.optimizers`.

    Learning rate, betas, eps and weight decay come from axolotl.
    """

    def get_input_args(self) -> str:
        return f"{__name__}.{MpOptimArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Set the optimizer class. The Trainer builds the optimizer later, with its own param
        groups."""
        chosen = cfg.mp_optim or {}
        trainer.optimizer_cls_and_kwargs = class_and_settings(trainer.args, chosen)
        log_own_norm(trainer)
