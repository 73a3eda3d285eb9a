"""Sums of squares of a wrapper's gradients, agreed with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.precision.backward_overlap import BackwardOverlap
from mp_optim.precision.main_params import MainParams
from mp_optim.precision.measure import (
    Measurement,
    NormKey,
    agree,
    count_zeros,
    measure,
    norm_groups,
    total_by_key,
)
from mp_optim.precision.param_sums import Places, UpdateWatch
from mp_optim.slots import ParamGroups


class AgreedSums:
    """What the verdict on a step is made of.

    Args:
        mains: the wrapper's slots, and over which ranks their parameters are split.
        param_groups: the wrapper's, whose settings the ranks compare.
        ranks: the ranks to agree with on the norm; None: this process alone.
        link: knows the sums of gradients that were measured in backward.
    """

    def __init__(
        self,
        mains: MainParams,
        config: OptimizerConfig,
        param_groups: ParamGroups,
        ranks: ProcessGroup | None,
        link: BackwardOverlap,
    ) -> None:
        self._mains, self._config, self._param_groups = mains, config, param_groups
        self._ranks, self._link = ranks, link
        self._names: list[str] | None = None
        self._has_checked = False

    def measure(
        self,
        grads: Sequence[Tensor],
        keys: Sequence[NormKey],
        all_keys: Sequence[NormKey],
        places: Places | None = None,
    ) -> Measurement:
        """Sums of squares of gradients, agreed with the other ranks.

        Args:
            grads, keys: local gradients, and which norm each counts in.
            all_keys: every key of the model, also those without a gradient now, so that all ranks
                reduce alike.
            places: of these gradients among the slots, if sums of single parameters are kept.
        """
        device, alike = self._mains.table.device, self._mains.table.settings
        if not self._has_checked:
            alike.check(self._config, self._param_groups, device)
            self._has_checked = True
        each = measure(grads, self._link.sums_of_squares, device)
        sums = total_by_key(each, keys, all_keys)
        zeros = None
        if self._config.log_num_zeros_in_grad:
            zeros = count_zeros(grads, keys, all_keys, device)
        if self._names is None or self._ranks is None:
            self._names = norm_groups(all_keys, self._ranks)
        numbers = alike.numbers(self._config, self._param_groups, keys, all_keys)
        params = None if places is None else places.spread(each)
        return agree(
            sums, zeros, self._ranks, self._names, numbers, alike.copies, params
        )

    def places(
        self, indices: Sequence[int], over: tuple[ProcessGroup, ...] = ()
    ) -> Places | None:
        """Where gradients belong, if ``log_param_grad_norms``.

        Args:
            indices: of the slots that have one.
            over: ranks over which the gradients are split although the parameters are not.
        """
        if not self._config.log_param_grad_norms:
            return None
        parts = self._mains.parts()
        return Places(indices, [(*over, *of) for of in parts] if over else parts)

    def watch_updates(self, mains: Callable[[], list[Tensor]]) -> UpdateWatch:
        """Main params, one of each slot, before a step that they are to be compared with."""
        parts, device = self._mains.parts(), self._mains.table.device
        return UpdateWatch(mains, parts, self._link.sum_of_squares, device)

    def group_added(self) -> None:
        """Some rank may have another one: ask all of them at the next step."""
        self._names, self._has_checked = None, False
