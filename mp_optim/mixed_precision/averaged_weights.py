"""Averages of main params in the place of a model's weights, for as long as a ``with`` block
lasts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mp_optim.core import Slot, local_tensor
from mp_optim.core.interrupted_step import StepMark
from mp_optim.core.quantized import is_quantized, quantize_
from mp_optim.core.slot_state import AVERAGE
from mp_optim.core.tensor_layout import region_of
from mp_optim.host.calls import in_own_modes
from mp_optim.host.torch_types import is_dtensor
from mp_optim.mixed_precision.main_params import MainParams
from mp_optim.process_groups.missing_ranks import MissingRanksError


class AveragedWeights:
    """The weights of a whole stack.

    Attributes:
        shares: what lets other ranks have parameters that were written here.
    """

    def __init__(self) -> None:
        self._own: list[tuple[MainParams, Slot, Tensor]] = []
        self.shares: list[Callable[[], None]] = []

    @contextmanager
    def swapped_in(self, wrappers: Sequence[MainParams], mark: StepMark) -> Iterator[None]:
        """See :meth:`~mp_optim.MegatronOptimizer.averaged_weights`.

        Args:
            wrappers: main params of the stack's wrappers, member by member.
            mark: set before the first parameter is written.
        """
        for mains in wrappers:
            _check_kept(mains)
        are_there = True
        with mark.lent("averaged_weights"):
            try:
                self.swap_in(wrappers)
                self.share(wrappers)
                yield
            except MissingRanksError:  # what other ranks own does not come back
                are_there = False
                raise
            finally:
                mark.touch()  # an interrupt from here on leaves it
                self.swap_back(wrappers)
                if are_there:
                    self.share(wrappers)
                    mark.clear()

    @in_own_modes
    def swap_in(self, wrappers: Sequence[MainParams]) -> None:
        """Write the averages into the model, in its dtypes; of a parameter that was never stepped
        there is none."""
        self._own.clear()  # of a block whose end was interrupted
        for mains in wrappers:
            for slot in mains.trained_slots():
                state = mains.stored(slot)
                if state["step"] > 0:
                    self._write(mains, slot, state[AVERAGE])

    def _write(self, mains: MainParams, slot: Slot, average: Tensor) -> None:
        param = mains.param(slot)
        if is_quantized(param):
            self._own.append((mains, slot, param))
            quantize_(param, average.float())
            return
        local = local_tensor(param)
        self._own.append((mains, slot, local.clone()))
        local.copy_(average.to(local.dtype))  # in the model's dtype to its device

    @in_own_modes
    def swap_back(self, wrappers: Sequence[MainParams]) -> None:
        """Give the model its own weights, to the bit."""
        for mains, slot, own in self._own:
            param = mains.param(slot)
            if is_quantized(param):
                quantize_(param, mains.stepped_value(slot))
            else:
                local = local_tensor(param)
                local.copy_(own)
        self._own.clear()

    @in_own_modes
    def share(self, wrappers: Sequence[MainParams]) -> None:
        """Have every rank, and FSDP2, see parameters that were written here."""
        for share in self.shares:
            share()
        params = itertools.chain.from_iterable(mains.table.params for mains in wrappers)
        if any(is_dtensor(param) for param in params):
            _forget_gathered()


def _check_kept(mains: MainParams) -> None:
    """Raise ValueError if no averages are kept."""
    slot = next(iter(mains.trained_slots()), None)
    if slot is not None and AVERAGE not in mains.stored(slot):
        raise ValueError(
            "averaged_weights: no averages are kept; set ema_decay (of OptimizerConfig, or of "
            "the optimizer's class)"
        )


def _forget_gathered() -> None:
    """Let FSDP2 gather its parameters anew: after a forward pass without backward the outermost
    module keeps them whole, and would go on with what they were."""
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            module.reshard()


@in_own_modes
def scale_rows_(
    wrappers: Sequence[MainParams], factors: Mapping[str, Tensor], mark: StepMark
) -> None:
    """See :meth:`~mp_optim.MegatronOptimizer.scale_rows_`; writes what this rank keeps.

    Args:
        mark: set before the first parameter is written.
    """
    if not isinstance(factors, Mapping):
        raise ValueError(
            f"scale_rows_: factors are a {type(factors).__name__}, not a dict of tensors by name"
        )
    places = {
        wrapper.name(slot): (wrapper, slot)
        for wrapper in wrappers
        for slot in wrapper.trained_slots()
    }
    for name, of_rows in factors.items():
        if name not in places:
            raise ValueError(
                f"scale_rows_: {name} is no parameter that is trained here; the names are those of "
                "named_main_params()"
            )
        wrapper, slot = places[name]
        _check(name, wrapper.param(slot), of_rows)
    mark.touch()
    for name, of_rows in factors.items():
        _scale(*places[name], of_rows)


def _check(name: str, param: Tensor, factors: Any) -> None:
    shape = region_of(param).shape
    needed = (
        f"the parameter has shape {tuple(shape)}, so one floating-point factor is needed for each "
        f"of {shape[0] if shape else 'its (no)'} rows"
    )
    if not isinstance(factors, Tensor):
        raise ValueError(
            f"scale_rows_: factors of {name} are a {type(factors).__name__}, not a tensor; {needed}"
        )
    if not shape or factors.shape != shape[:1] or not factors.is_floating_point():
        raise ValueError(
            f"scale_rows_: factors of {name} are {factors.dtype} of shape {tuple(factors.shape)}; "
            f"{needed}"
        )
    if factors.is_meta or factors.layout != torch.strided or is_dtensor(factors):
        raise ValueError(
            f"scale_rows_: factors of {name} are a {type(factors).__name__} of layout "
            f"{factors.layout} on {factors.device}; a plain dense tensor with values is needed "
            "(to_dense(), full_tensor())"
        )
    finite = factors.float().isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(
            f"scale_rows_: the factor of row {row} of {name} is {float(factors[row])!r}, which is "
            "not finite in FP32"
        )


def _scale(wrapper: MainParams, slot: Slot, factors: Tensor) -> None:
    main = wrapper.stepped_value(slot)
    of_elements = _for_elements(wrapper.param(slot), factors.to(main.device))
    if main.numel():
        wrapper.set_stepped_value(slot, main * of_elements.float())


def _for_elements(param: Tensor, factors: Tensor) -> Tensor:
    """The factor of each element that a rank has of a parameter, in a shape that multiplies it."""
    region, local = region_of(param), local_tensor(param)
    if region.offsets is not None:
        first = region.offsets[0]
        rows = factors[first : first + local.shape[0]]
        return rows.view(-1, *[1] * (local.dim() - 1))
    row = region.shape[1:].numel()
    indices = torch.arange(local.numel(), device=factors.device) + region.start
    return factors[indices // row].view(local.shape)
