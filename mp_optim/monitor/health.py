"""Gradient health: the norm of each parameter's gradient, and the loss for the rolling skip rule.

The global norm is computed from the sums of squares of single parameters. These sums are copied to
the host together with the verdict, so the norms need no second read of gradients and no wait.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.mixed_precision.clip_and_skip import Verdict
from mp_optim.mixed_precision.observer import Observer


class GradientHealth(Observer):
    """Norms of single parameters' gradients, and reports of the loss: ``optimizer.health``.

    If ranks share a parameter (FSDP2, tensor parallelism, a distributed optimizer), its norm is
    that of the whole parameter. A stage of a pipeline has the norms of its own parameters only.
    """

    def report_loss(self, loss: Tensor | float | None, group: ProcessGroup | None = None) -> None:
        """Report the loss of the coming step, before ``step()``, for ``skip_step_sigma_factor``.
        Without that setting nothing is done.

        In a job of several ranks this is a collective over ``group``: the losses of the ranks are
        averaged, so that all ranks decide alike.

        Args:
            loss: loss of this rank's whole batch, not scaled: a number or a tensor of one element.
                The host does not wait for a tensor. None if this rank has no loss (a stage of a
                pipeline).
            group: the ranks that step together; by default all ranks of the job.

        Raises:
            ValueError: the loss is not one real number.
        """
        self.stack.observers["skip_rule"].report_loss(loss, group)

    def grad_norms(self, top: int | None = None) -> dict[str, float]:
        """Return the gradient norm of each parameter in the last step by name, the largest first.

        Norms are unscaled, before clipping; 0 for a parameter without a gradient. The call waits
        until the host knows the verdict of that step.

        Args:
            top: number of norms to return; None for all.

        Raises:
            ValueError: no norms are kept, because ``log_param_grad_norms`` is 0.
        """
        if not self.stack.config.log_param_grad_norms:
            raise ValueError(
                "log_param_grad_norms=0: no norms of parameters are kept; set "
                "log_param_grad_norms to the number of norms that metrics() shows"
            )
        return self.norms_in(self.stack.counts.last_verdict(), top)

    def norms_in(self, verdict: Verdict, top: int | None = None) -> dict[str, float]:
        """Return the largest gradient norms of a verdict by parameter name; empty if no norms were
        kept.

        Args:
            verdict: verdict of a step.
            top: number of norms to return; None for all.
        """
        if verdict.param_sums is None:
            return {}
        inverse = verdict.scaling[0] if verdict.scaling else 1.0
        sums = verdict.param_sums
        values = sums.where(~sums.isnan(), math.inf).tolist()
        order = sorted(range(len(values)), key=lambda index: -values[index])[:top]
        name_of, slots = self.stack.slot_name, self.stack.slots()
        return {name_of(slots[index]): math.sqrt(values[index]) * inverse for index in order}

    def metrics(self) -> dict[str, float]:
        """Return the ``log_param_grad_norms`` largest norms of the last step as
        ``param_grad_norm/<name>``."""
        stack = self.stack
        norms = self.norms_in(stack.counts.last_verdict(), stack.config.log_param_grad_norms)
        return {f"param_grad_norm/{name}": norm for name, norm in norms.items()}
