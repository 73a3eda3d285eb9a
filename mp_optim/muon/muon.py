"""Muon (Jordan 2024) for matrices and stacks of matrices, with Adam or Lion for other parameters.

Formulas: docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from mp_optim.config.rules import coefficients
from mp_optim.core import SlotUpdate
from mp_optim.core.slot_state import AVERAGE, MOMENT2, REMAINDER, scale_key
from mp_optim.kernels import Backend
from mp_optim.kernels.kernel_args import MAIN, MuonScalars
from mp_optim.kernels.reference import MOMENTUM
from mp_optim.muon.matrix_exchange import MatrixOwners
from mp_optim.muon.orthogonalization import (
    Orthogonalization,
    directions,
    normalized,
    runs,
    runs_of_wholes,
    whole_directions,
)
from mp_optim.rules.rule import NAMED_RULES, Launch, Rule, Settings, check_decoupled

_SCALARS = {name: NAMED_RULES[name] for name in ("adam", "lion")}


class MuonRule(Rule):
    """Muon for FP32 matrices, shape (rows, columns), and for stacks, shape (experts, rows,
    columns).

    Weight decay is decoupled. Another rule steps groups with ``optimizer="adam"`` or
    ``optimizer="lion"``. The products are computed for whole matrices on the device of the model's
    parameter, also if the matrix is sharded or stepped on the host.

    Args:
        scalar: name of the other rule, "adam" or "lion".

    Raises:
        ValueError: the other rule is neither adam nor lion.
    """

    name = "muon"
    reads_steps = False
    deciding_setting = "moment2_method"
    group_settings: Mapping[str, Any] = MappingProxyType({"optimizer": "muon"})

    def __init__(self, scalar: str = "adam") -> None:
        if scalar not in _SCALARS:
            raise ValueError(
                f"scalar_optimizer={scalar!r}: is not supported; choose from {list(_SCALARS)}"
            )
        self._scalar = _SCALARS[scalar]

    @property
    def kernels(self) -> str:
        return self._scalar.name

    def of(self, group: Settings) -> Rule:
        return self if group["optimizer"] == "muon" else self._scalar

    def moments(self, group: Settings) -> tuple[str, ...]:
        return (MOMENTUM, MOMENT2) if group.get("moment2_method") else (MOMENTUM,)

    def check_settings(self, group: Settings) -> None:
        if group["optimizer"] not in ("muon", self._scalar.name):
            raise ValueError(
                f"optimizer={group['optimizer']!r}: is not a rule of this optimizer; choose 'muon' "
                f"or {self._scalar.name!r}"
            )
        super().check_settings(group)
        if group["optimizer"] == "adam":
            check_decoupled(group)
        coefficients(group["coefficient_type"], group["num_ns_steps"])
        if group.get("moment2_method") and group["tp_mode"] == "blockwise":
            raise ValueError(
                f"moment2_method={group['moment2_method']!r}: needs whole rows of matrices, which "
                "tp_mode='blockwise' does not have; set tp_mode='duplicated'"
            )

    def check_shapes(self, group: Settings, shapes: Iterable[torch.Size]) -> None:
        if group["optimizer"] != "muon":
            return
        names = group.get("param_names") or group.get("fqns")
        for index, shape in enumerate(shapes):
            if len(shape) < 2:
                name = names[index] if names else f"param{index}"
                raise ValueError(
                    f"{name} has shape {tuple(shape)}: muon steps only matrices; put the parameter "
                    "into a group with optimizer='adam' or 'lion'"
                )

    def new_workspace(self) -> MatrixOwners:
        return MatrixOwners()

    def is_collective(self, group: Settings, update: SlotUpdate) -> bool:
        is_parallel = update.layout is not None and update.layout.tensor_parallel is not None
        adds_up = group.get("moment2_method") and (update.shard_groups or is_parallel)
        return bool(adds_up) or _shares_matrices(group, update)

    def backend_and_reason(self, backend: Backend, why: str, group: Settings) -> tuple[str, str]:
        return backend.name, (
            f"{why}; muon: torch's matrix products on the model's device (their bits may differ "
            "between devices and numbers of threads)"
        )

    def apply(self, launch: Launch, backend: Backend) -> None:
        lists, group, multiplier = launch.lists, launch.settings, float(launch.factor)
        owners, updates = launch.workspace, launch.updates
        assert isinstance(owners, MatrixOwners)
        # Muon reads averages and second moments from the tensors that it writes, so first copy the
        # source values into these tensors.
        if not lists.state.keys().isdisjoint((AVERAGE, MOMENT2)):
            lists = lists.in_place()
        scalars, rule = MuonScalars.at(group), Orthogonalization.of(group)
        owners.begin(each.slot for each in updates if _shares_matrices(group, each))
        found = runs(lists.main, updates.slots.layouts, rule.blockwise)
        for members, is_here in runs_of_wholes(launch.regions) if rule.is_normalized else found:
            chosen = lists.take(members)
            device = lists.main[0].device
            rounded = [
                torch.empty(main.shape, dtype=rule.dtype, device=device) for main in chosen.main
            ]
            momenta = chosen.only(MOMENTUM, scale_key(MOMENTUM))
            momenta = replace(momenta, main=[], output=rounded)
            params = replace(chosen.only(MAIN, REMAINDER), grad=rounded)
            backend.muon_momentum(momenta, scalars, multiplier)
            if is_here:
                ways = whole_directions(rule, rounded)
            else:
                some = updates.take(members)
                ways = directions(rule, rounded, some.slots.layouts, owners)
                if rule.is_normalized:
                    regions = [launch.regions[index] for index in members]
                    ways = normalized(rule, ways, chosen.state[MOMENT2], some, regions)
            values, factors = zip(*ways, strict=True)
            backend.muon_apply(replace(params, grad=list(values)), scalars, factors)
        backend.average(lists)


def _shares_matrices(group: Settings, update: SlotUpdate) -> bool:
    """True if ranks have to exchange shards of a slot to get whole matrices."""
    layout, blockwise = update.layout, group["tp_mode"] == "blockwise"
    return layout is not None and layout.is_shared(blockwise)
