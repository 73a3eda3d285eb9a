"""Replaces a model's weights by the averages of its main params inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from mp_optim.core import Slot, local_tensor
from mp_optim.core.quantized import is_quantized, quantize_
from mp_optim.core.slot_state import AVERAGE
from mp_optim.host.calls import in_own_modes
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.mixed_precision.main_params import MainParams
from mp_optim.mixed_precision.observer import Observer
from mp_optim.process_groups.missing_ranks import MissingRanksError

OwnWeights = list[tuple[MainParams, Slot, Tensor]]
"""For each replaced weight: the main params of its wrapper, its slot, and a copy of the weight."""


class AveragedWeights(Observer):
    """Writes the averages of a stack's main params to its model for a ``with`` block."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Return a context in which the model's parameters are the averages of the main params. See
        :meth:`mp_optim.MegatronOptimizer.averaged_weights`."""
        stack = self.stack
        stack.make_current()
        for mains in stack.all_mains():
            slot = next(iter(mains.slots_with_main()), None)
            if slot is not None and AVERAGE not in mains.executor.state_of(slot).live():
                raise ValueError(
                    "averaged_weights: the optimizer keeps no averages; set ema_decay (of "
                    "OptimizerConfig, or of the optimizer's class)"
                )
        own: OwnWeights = []
        are_there, mark = True, stack.step_mark
        with mark.lent("averaged_weights"):
            try:
                swap_in(stack, own)
                stack.show_written_params()
                yield
            # If ranks are missing, this rank cannot make its weights visible to them. So leave the
            # stack marked as inconsistent.
            except MissingRanksError:
                are_there = False
                raise
            finally:
                # An interrupt after this line leaves the averages in the model, so mark the stack
                # as inconsistent first.
                mark.touch()
                swap_back(own)
                if are_there:
                    stack.show_written_params()
                    mark.clear()


@in_own_modes
def swap_in(stack: MegatronOptimizer, own: OwnWeights) -> None:
    """Write the averages to the model, rounded to the dtypes of its parameters. A parameter that
    was never stepped has no average and keeps its value.

    Args:
        stack: the outermost optimizer.
        own: the list to which copies of the model's own weights are appended.
    """
    for mains in stack.all_mains():
        for slot in mains.slots_with_main():
            state = mains.executor.state_of(slot).live()
            if state["step"] == 0:
                continue
            param, average = mains.param(slot), state[AVERAGE]
            if is_quantized(param):
                own.append((mains, slot, param))
                quantize_(param, average.float())
                continue
            local = local_tensor(param)
            own.append((mains, slot, local.clone()))
            # Convert before the copy, so that fewer bytes are copied between devices.
            local.copy_(average.to(local.dtype))


@in_own_modes
def swap_back(own: OwnWeights) -> None:
    """Write the model's own weights back. They have the same bits as before :func:`swap_in`."""
    for mains, slot, value in own:
        param = mains.param(slot)
        if is_quantized(param):
            quantize_(param, mains.executor.main_param(slot))
        else:
            local_tensor(param).copy_(value)
