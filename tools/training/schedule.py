"""The learning rate of a run: Megatron's scheduler, counting steps (not samples)."""

from __future__ import annotations

from typing import Any

import torch

import mp_optim
from training.config import TrainConfig


class RunSchedule(mp_optim.OptimizerParamScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
        scheduler, weight_decay = config.scheduler, config.optimizer.weight_decay
        decay_steps = scheduler.lr_decay_steps or config.run.steps
        wsd_steps = scheduler.wsd_decay_steps or max(1, decay_steps // 5)
        is_wsd = scheduler.lr_decay_style == "WSD"
        given = {
            "lr_decay_steps": scheduler.lr_decay_steps,
            "wsd_decay_steps": scheduler.wsd_decay_steps,
        }
        self._follow_run = [name for name, value in given.items() if value is None]
        super().__init__(
            optimizer,
            init_lr=scheduler.lr_warmup_init,
            max_lr=config.optimizer.lr,
            min_lr=config.optimizer.min_lr or 0.0,
            lr_warmup_steps=scheduler.lr_warmup_steps,
            lr_decay_steps=decay_steps,
            lr_decay_style=scheduler.lr_decay_style,
            start_wd=weight_decay,
            end_wd=weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            wsd_decay_steps=wsd_steps if is_wsd else None,
            lr_wsd_decay_style=scheduler.lr_wsd_decay_style if is_wsd else None,
            use_checkpoint_opt_param_scheduler=False,
        )

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        try:
            super().check_state_dict(self._of_this_run(state_dict))
        except ValueError as error:
            difference = str(error).partition(";")[0]
            raise ValueError(
                f"the schedule is not that of the run to resume: {difference}; go on with its "
                "settings, or start another run in another --run.output-dir"
            ) from error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(self._of_this_run(state_dict))

    def _of_this_run(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        lengths = {name: getattr(self, name) for name in self._follow_run}
        return {**state_dict, **lengths}
