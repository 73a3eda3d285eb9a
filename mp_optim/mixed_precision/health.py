"""Gradient health: norms of single parameters' gradients, what steps add to parameters, and the
loss for the rolling rule that skips spikes.

Norms come with the verdict: the sums of squares that the global norm is made of are kept apart and
travel to the host in the verdict's own copy. So they cost no read of gradients, and no wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.core import ParamGroups, iter_slots, local_tensor, slot_name
from mp_optim.core.identity import check_lists
from mp_optim.core.tensors import device_of
from mp_optim.host.calls import in_own_modes
from mp_optim.kernels.sums import reduce_over
from mp_optim.mixed_precision.clip_and_skip import DeviceVerdict, Verdict, fetched
from mp_optim.mixed_precision.grad_norm import StepGrads
from mp_optim.mixed_precision.skip_rule import RollingRule


def _check_loss(loss: object) -> None:
    if loss is None or (type(loss) is not bool and isinstance(loss, Real)):
        return
    if isinstance(loss, Tensor):
        is_plain = loss.layout == torch.strided and not loss.is_meta
        if is_plain and loss.numel() == 1 and not loss.is_complex():
            return
        what = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}, on {loss.device}"
    else:
        what = repr(loss)
    raise ValueError(
        f"report_loss: the loss is {what}, not one real number; give the mean over the batch "
        "(loss.mean()), or None where this rank has none"
    )


class Update(NamedTuple):
    """What a step added to a parameter: its root mean square, and its norm divided by that of the
    parameter before the step."""

    rms: float
    ratio: float


class GradientHealth:
    """``optimizer.health`` of a stack.

    Norms are of whole parameters where ranks share them by FSDP2, tensor parallelism or a
    distributed optimizer; those of other stages of a pipeline are known there.

    Args:
        param_groups: the stack's live groups.
        sizes: the number of parameters that were added to each group, live.
        skip_rule: the rule that judges reported losses.

    Attributes:
        verdict: on the last step of this stack; of a part, None.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        sizes: Sequence[int],
        skip_rule: RollingRule,
        config: OptimizerConfig,
    ) -> None:
        self._param_groups, self._sizes = param_groups, sizes
        self.skip_rule, self._config = skip_rule, config
        self.verdict: Verdict | DeviceVerdict | None = None
        self._updates: Callable[[], Tensor] | None = None
        self._updated = 0

    @in_own_modes
    def report_loss(self, loss: Tensor | float | None, group: ProcessGroup | None = None) -> None:
        """Say the loss of the coming step, for ``skip_step_sigma_factor``; without that, nothing
        is done. Call it before each ``step()``.

        The ranks' losses are averaged, as all of them have to decide alike: collective over
        ``group`` in a job of several.

        Args:
            loss: of the whole batch of this rank, not scaled, one element; a tensor is not waited
                for. None if this rank has none (a stage of a pipeline).
            group: the ranks that step together; by default all of the job.

        Raises:
            ValueError: that is no loss of one element.
        """
        _check_loss(loss)
        rule = self.skip_rule
        if not rule.is_on:
            return
        on = loss.device if isinstance(loss, Tensor) else device_of(self._param_groups)
        known = 0.0 if loss is None else 1.0
        total = torch.full((2,), known, dtype=torch.float64, device=on)
        if isinstance(loss, Tensor):
            total[:1].copy_(local_tensor(loss.detach()).reshape(1))
        elif loss is not None:
            total[:1].fill_(loss)
        if dist.is_available() and dist.is_initialized():
            ranks = dist.group.WORLD if group is None else group
            assert ranks is not None
            reduce_over((ranks,), total, "averaging the loss")
        rule.reported = total[:1] / total[1:]

    def grad_norms(self, top: int | None = None) -> dict[str, float]:
        """The norm of each parameter's gradient in the last step, unscaled, before clipping, by
        name, the largest first; 0 where there was no gradient. Waits for the verdict of that step.

        Args:
            top: only so many.

        Raises:
            ValueError: none are kept.
        """
        if not self._config.log_param_grad_norms:
            raise ValueError(
                "log_param_grad_norms=0, so no norms of parameters are kept; set it to how many of "
                "them metrics() is to show"
            )
        return self.norms_in(self._settled(), top)

    def norms_in(self, verdict: Verdict, top: int | None = None) -> dict[str, float]:
        """The same as a verdict has them; empty if it has none."""
        if verdict.param_sums is None:
            return {}
        inverse = verdict.scaling[0] if verdict.scaling else 1.0
        sums = verdict.param_sums
        values = sums.where(~sums.isnan(), math.inf).tolist()
        return {
            name: math.sqrt(value) * inverse for name, value in self._largest(values, top).items()
        }

    def updates(self, top: int | None = None) -> dict[str, Update]:
        """What the last step that was watched (``log_update_ratios_interval``) added to each
        parameter, by name, the largest ratio first; empty before the first. Waits for that step.

        Args:
            top: only so many.
        """
        if self._updates is None:
            return {}
        rows = self._updates().reshape(-1, 3).tolist()
        found = [_update(row) for row in rows]
        ratios = [update.ratio for update in found]
        return {name: found[index] for index, name in self._in_order(ratios, top)}

    def metrics(self) -> dict[str, float]:
        """Limits of the rolling rule; the largest norms; the last updates."""
        if self.verdict is None:
            return {}
        verdict, top = self._settled(), self._config.log_param_grad_norms
        limits = {} if verdict.judgement is None else verdict.judgement.metrics()
        norms = self.norms_in(verdict, top)
        return {
            **limits,
            **{f"param_grad_norm/{name}": norm for name, norm in norms.items()},
            **self._update_metrics(top),
        }

    def _update_metrics(self, top: int) -> dict[str, float]:
        if self._updates is None:
            return {}
        total = self._updates().reshape(-1, 3).sum(dim=0).tolist()
        whole, largest = _update(total), self.updates(top)
        return {
            "update_step": self._updated,
            "update_rms": whole.rms,
            "update_ratio": whole.ratio,
            **{f"update_ratio/{name}": of.ratio for name, of in largest.items()},
        }

    # -- what the step says -----------------------------------------------------------------------

    @contextmanager
    def watching(self, grads: StepGrads, step: int) -> Iterator[None]:
        """While a step is applied: compare what it changes."""
        watches = grads.watch_updates()
        yield
        sums = [watch.finish() for watch in watches]
        device = sums[0].device
        self._updates = fetched(torch.cat([of.to(device) for of in sums]).reshape(-1))
        self._updated = step

    def _settled(self) -> Verdict:
        verdict = Verdict() if self.verdict is None else self.verdict
        return verdict.settle() if isinstance(verdict, DeviceVerdict) else verdict

    def _largest(self, values: Sequence[float], top: int | None) -> dict[str, float]:
        return {name: values[index] for index, name in self._in_order(values, top)}

    def _in_order(self, values: Sequence[float], top: int | None) -> list[tuple[int, str]]:
        """Index and name of the largest values' parameters."""
        groups = self._param_groups
        check_lists(groups, self._sizes)
        order = sorted(range(len(values)), key=lambda i: -values[i])[:top]
        slots = [slot for slot, _ in iter_slots(groups)]
        return [(index, slot_name(groups, slots[index])) for index in order]


def _update(row: Sequence[float]) -> Update:
    """Of sums of squares of weight and update, and a number of elements."""
    weight, update, numel = row
    rms = math.sqrt(update / numel) if numel else 0.0
    ratio = math.sqrt(update / weight) if weight else (math.inf if update else 0.0)
    return Update(rms, ratio)
