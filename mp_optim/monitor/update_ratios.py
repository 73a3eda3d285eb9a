"""Update ratios: the size of the change that a step makes to each parameter, relative to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mp_optim.core import local_tensor
from mp_optim.kernels.sums import index_on, reduce_rows
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.mixed_precision.clip_and_skip import DeviceVerdict, Verdict, fetched
from mp_optim.mixed_precision.grad_norm import measure
from mp_optim.mixed_precision.main_params import MainParams
from mp_optim.mixed_precision.observer import Observer, largest
from mp_optim.mixed_precision.step import StepGrads


class Update(NamedTuple):
    """Change of a parameter by a step.

    Attributes:
        rms: root mean square of the change.
        ratio: norm of the change divided by the parameter's norm before the step.
    """

    rms: float
    ratio: float


class UpdateRatios(Observer):
    """Changes of all parameters by the last watched step, every ``log_update_ratios_interval``
    steps. During that step it holds a copy of the main params: 4 bytes per parameter of this rank.
    """

    def __init__(self, stack: MegatronOptimizer) -> None:
        super().__init__(stack)
        self._config = stack.config
        self._before: list[list[Tensor]] = []
        self._read: Callable[[], Tensor] | None = None
        self._updated = 0

    @property
    def is_on(self) -> bool:
        return self._config.log_update_ratios_interval > 0

    def before_step(self) -> None:
        self._before = []
        interval = self._config.log_update_ratios_interval
        if interval > 0 and (self.stack.counts.steps + 1) % interval == 0:
            self._before = [
                [main.detach().clone() for main in _main_tensors(mains)]
                for mains in self.stack.all_mains()
            ]

    def after_step(self, grads: StepGrads, verdict: Verdict | DeviceVerdict) -> None:
        if not self._before:
            return
        stack = self.stack
        pairs = zip(stack.all_mains(), self._before, strict=True)
        sums = [_sums(mains, before, self._config.fused_backend) for mains, before in pairs]
        self._before, device = [], sums[0].device
        self._read = fetched(torch.cat([of.to(device) for of in sums]).reshape(-1))
        self._updated = stack.counts.steps

    def updates(self, top: int | None = None) -> dict[str, Update]:
        """See :meth:`mp_optim.monitor.health.GradientHealth.updates`."""
        if self._read is None:
            return {}
        found = [_update(row) for row in self._read().reshape(-1, 3).tolist()]
        ratios = [update.ratio for update in found]
        return {name: found[index] for index, name in largest(self.stack, ratios, top)}

    def metrics(self) -> dict[str, float]:
        """Return size and ratio of the whole update, and the largest ratios by parameter."""
        if self._read is None:
            return {}
        whole = _update(self._read().reshape(-1, 3).sum(dim=0).tolist())
        shown = self.updates(self._config.log_param_grad_norms)
        return {
            "update_step": self._updated,
            "update_rms": whole.rms,
            "update_ratio": whole.ratio,
            **{f"update_ratio/{name}": of.ratio for name, of in shown.items()},
        }


def _main_tensors(mains: MainParams) -> list[Tensor]:
    return [local_tensor(mains.stepped_value(slot)) for slot in mains.table.slots]


def _sums(mains: MainParams, before: list[Tensor], backend: str) -> Tensor:
    """Return for each slot the sum of squares of its main param before the step and of the step's
    change, and the number of elements: FP64, shape (slots, 3). Collective."""
    device = mains.table.common.device
    weights = measure(before, backend, device)
    for was, now in zip(before, _main_tensors(mains), strict=True):
        was.sub_(now.detach())
    updates = measure(before, backend, device)
    numel = index_on(device, tuple(tensor.numel() for tensor in before)).double()
    sums = torch.stack([weights, updates, numel], dim=1)
    reduce_rows(sums, mains.split_over(), "adding up the updates of parameters")
    return sums


def _update(row: Sequence[float]) -> Update:
    """Return the update of sums of squares of weight and change, and a number of elements."""
    weight, update, numel = row
    rms = math.sqrt(update / numel) if numel else 0.0
    ratio = math.sqrt(update / weight) if weight else (math.inf if update else 0.0)
    return Update(rms, ratio)
