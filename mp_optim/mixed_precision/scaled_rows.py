"""Multiplies rows of parameters by factors between two steps, as QK-clip needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.core import local_tensor
from mp_optim.core.interrupted_step import StepMark
from mp_optim.core.tensor_layout import region_of
from mp_optim.host.calls import in_own_modes
from mp_optim.host.torch_types import is_dtensor
from mp_optim.mixed_precision.main_params import MainParams


@in_own_modes
def scale_rows_(
    wrappers: Sequence[MainParams], factors: Mapping[str, Tensor], mark: StepMark
) -> None:
    """Multiply the rows of parameters on this rank
    (:meth:`~mp_optim.MegatronOptimizer.scale_rows_`).

    Args:
        wrappers: main params of each wrapper.
        factors: by FQN, one factor for each row.
        mark: consistency flag, set before the first write.
    """
    if not isinstance(factors, Mapping):
        raise ValueError(
            f"scale_rows_: factors is a {type(factors).__name__}; pass a dict of tensors by name"
        )
    places = {
        wrapper.name(slot): (wrapper, slot)
        for wrapper in wrappers
        for slot in wrapper.slots_with_main()
    }
    for name, of_rows in factors.items():
        if name not in places:
            raise ValueError(
                f"scale_rows_: {name} is not a trained parameter; use the names of "
                "named_main_params()"
            )
        wrapper, slot = places[name]
        _check(name, wrapper.param(slot), of_rows)
    mark.touch()
    for name, of_rows in factors.items():
        wrapper, slot = places[name]
        main = wrapper.executor.main_param(slot)
        if not main.numel():
            continue
        region, local = region_of(wrapper.param(slot)), local_tensor(wrapper.param(slot))
        of_rows = of_rows.to(main.device)
        if region.offsets is not None:
            first = region.offsets[0]
            of_elements = of_rows[first : first + local.shape[0]].view(-1, *[1] * (local.dim() - 1))
        else:
            indices = torch.arange(local.numel(), device=main.device) + region.start
            of_elements = of_rows[indices // region.shape[1:].numel()].view(local.shape)
        wrapper.set_stepped_value(slot, main * of_elements.float())


def _check(name: str, param: Tensor, factors: Any) -> None:
    shape = region_of(param).shape
    is_plain = isinstance(factors, Tensor) and factors.layout == torch.strided
    is_plain = is_plain and not (factors.is_meta or is_dtensor(factors))
    if not (is_plain and factors.is_floating_point() and shape and factors.shape == shape[:1]):
        form = tuple(getattr(factors, "shape", ()))
        raise ValueError(
            f"scale_rows_: the factors of {name} are a {type(factors).__name__} of shape {form}, "
            f"and the parameter has shape {tuple(shape)}; give a plain dense floating-point tensor "
            "with one factor for each row of the parameter"
        )
    finite = factors.float().isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(
            f"scale_rows_: the factor of row {row} of {name} is {float(factors[row])!r}, which is "
            "not finite in FP32; pass finite factors"
        )
