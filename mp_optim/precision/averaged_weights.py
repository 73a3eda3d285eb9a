"""Averages of main params in the place of a model's weights, for as long as a ``with`` block
lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.precision.main_params import MainParams
from mp_optim.process.leases import before_writing
from mp_optim.process.torch_modes import in_own_modes
from mp_optim.quantized import is_quantized, quantize_
from mp_optim.ranks.missing_ranks import MissingRanksError
from mp_optim.slots import Slot, local_tensor
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.state_keys import AVERAGE


class WeightSwap:
    """The weights of one wrapper.

    Args:
        mains: its parameters, and what is kept for them.
    """

    def __init__(self, mains: MainParams) -> None:
        self.mains = mains
        self._own: list[tuple[Slot, Tensor]] = []

    def check(self) -> None:
        """Raise ValueError if no averages are kept."""
        slot = next(iter(self.mains.trained_slots()), None)
        if slot is not None and AVERAGE not in self.mains.stored(slot):
            raise ValueError(
                "averaged_weights: no averages are kept; set ema_decay (of OptimizerConfig, or of "
                "the optimizer's class)"
            )

    def is_sharded(self) -> bool:
        """Whether parameters are DTensors, which FSDP2 may have gathered."""
        return any(isinstance(param, DTensor) for param in self.mains.table.params)

    @in_own_modes
    def swap_in(self) -> None:
        """Write the averages into the model, in its dtypes; of a parameter that was never stepped
        there is none."""
        self._own.clear()  # of a block whose end was interrupted
        for slot in self.mains.trained_slots():
            state = self.mains.stored(slot)
            if state["step"] > 0:
                self._write(slot, state[AVERAGE])
        self.mains.take_as_seen()

    def _write(self, slot: Slot, average: Tensor) -> None:
        param = self.mains.param(slot)
        if is_quantized(param):
            self._own.append((slot, param))
            quantize_(param, average.float())
            return
        local = local_tensor(param)
        before_writing([local])
        self._own.append((slot, local.clone()))
        local.copy_(average.to(local.dtype))  # in the model's dtype to its device

    @in_own_modes
    def swap_back(self) -> None:
        """Give the model its own weights, to the bit."""
        for slot, own in self._own:
            param = self.mains.param(slot)
            if is_quantized(param):
                quantize_(param, self.mains.stepped_value(slot))
            else:
                local = local_tensor(param)
                before_writing([local])
                local.copy_(own)
        self._own.clear()
        self.mains.take_as_seen()


class AveragedWeights:
    """The weights of a whole stack.

    Attributes:
        swaps: part by part.
        shares: what lets other ranks have parameters that were written here.
    """

    def __init__(self) -> None:
        self.swaps: list[WeightSwap] = []
        self.shares: list[Callable[[], None]] = []

    @contextmanager
    def swapped_in(self, mark: StepMark) -> Iterator[None]:
        """See :meth:`~mp_optim.MegatronOptimizer.averaged_weights`."""
        for swap in self.swaps:
            swap.check()
        are_there = True
        with mark.lent("averaged_weights"):
            try:
                for swap in self.swaps:
                    swap.swap_in()
                self.share()
                yield
            except MissingRanksError:  # what other ranks own does not come back
                are_there = False
                raise
            finally:
                mark.touch()  # an interrupt from here on leaves it
                for swap in self.swaps:
                    swap.swap_back()
                if are_there:
                    self.share()
                    mark.clear()

    @in_own_modes
    def share(self) -> None:
        """Have every rank, and FSDP2, see parameters that were written here."""
        for share in self.shares:
            share()
        if any(swap.is_sharded() for swap in self.swaps):
            _forget_gathered()


def _forget_gathered() -> None:
    """Let FSDP2 gather its parameters anew: after a forward pass without backward the outermost
    module keeps them whole, and would go on with what they were."""
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            module.reshard()
