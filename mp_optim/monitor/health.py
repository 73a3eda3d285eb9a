"""Gradient health: norms of single parameters' gradients, and the loss for the rolling rule.

Norms come with the verdict: the global norm's sums of squares by parameter are kept, and copied to
the host together with the verdict. So they cost no read of gradients and no wait.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.mixed_precision.clip_and_skip import Verdict
from mp_optim.mixed_precision.observer import Observer


class GradientHealth(Observer):
    """``optimizer.health`` of a stack.

    Norms are of whole parameters where ranks share them by FSDP2, tensor parallelism or a
    distributed optimizer. Each stage of a pipeline knows the norms of its own parameters.
    """

    def report_loss(self, loss: Tensor | float | None, group: ProcessGroup | None = None) -> None:
        """Report the loss of the coming step, for ``skip_step_sigma_factor``; without that, nothing
        is done. Call it before each ``step()``.

        The ranks' losses are averaged, as all of them have to decide alike: collective over
        ``group`` in a job of several ranks.

        Args:
            loss: loss of this rank's whole batch, not scaled, one element. The host does not wait
                for a tensor. None if this rank has none (a stage of a pipeline).
            group: the ranks that step together; by default all ranks of the job.

        Raises:
            ValueError: the loss is not one real number.
        """
        self.stack.observers["skip_rule"].report_loss(loss, group)

    def grad_norms(self, top: int | None = None) -> dict[str, float]:
        """Return the norm of each parameter's gradient in the last step, unscaled, before clipping,
        by name, the largest first; 0 where there was no gradient. Waits for the verdict of that
        step.

        Args:
            top: the number of norms to return; None for all.

        Raises:
            ValueError: no norms are kept.
        """
        if not self.stack.config.log_param_grad_norms:
            raise ValueError(
                "log_param_grad_norms=0: no norms of parameters are kept; set it to the number "
                "of norms for metrics()"
            )
        return self.norms_in(self.stack.counts.settle(), top)

    def norms_in(self, verdict: Verdict, top: int | None = None) -> dict[str, float]:
        """Return the ``top`` largest gradient norms of a verdict by parameter; empty if it has
        none."""
        if verdict.param_sums is None:
            return {}
        inverse = verdict.scaling[0] if verdict.scaling else 1.0
        sums = verdict.param_sums
        values = sums.where(~sums.isnan(), math.inf).tolist()
        order = sorted(range(len(values)), key=lambda index: -values[index])[:top]
        name_of, slots = self.stack.slot_name, self.stack.slots()
        return {name_of(slots[index]): math.sqrt(values[index]) * inverse for index in order}

    def metrics(self) -> dict[str, float]:
        """Return the largest norms."""
        stack = self.stack
        norms = self.norms_in(stack.counts.settle(), stack.config.log_param_grad_norms)
        return {f"param_grad_norm/{name}": norm for name, norm in norms.items()}
