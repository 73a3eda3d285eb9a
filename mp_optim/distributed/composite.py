"""CompositeOptimizer: several optimizers as one. What is asked about a slot is asked of the part
that has it; what is asked about all is asked of all."""

from __future__ import annotations

import contextlib
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.config import OptimizerConfig
from mp_optim.precision import MegatronGradScaler, MegatronOptimizer, Verdict
from mp_optim.precision.description import Description, DescriptionRow
from mp_optim.precision.device_verdict import DeviceVerdict
from mp_optim.precision.graph_step import graph_metrics, graph_notes
from mp_optim.precision.measure import NormKey
from mp_optim.precision.settings_agreement import SettingsAlike
from mp_optim.precision.step_grads import GradsOfParts, StepGrads
from mp_optim.slots import Slot
from mp_optim.slots.interrupted_step import StepMark
from mp_optim.slots.keyed_optimizer import Mode
from mp_optim.slots.slot_state import SlotState

_SUMMED = (
    "bytes_|muon_flops$|update_clipped_params$|reloaded_params$|.*_ms$|"
    "speculation_(hits|redone|stale)$"
)
"""Metrics that are added up over the parts."""


class CompositeOptimizer(MegatronOptimizer):
    """Parts that step together: one measurement, one verdict, one loss scale.

    Subclasses provide :meth:`locate`, and :meth:`take_parts` when they have them.

    Attributes:
        parts: in slot order.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
    ) -> None:
        self.parts: list[MegatronOptimizer] = []
        super().__init__(params, defaults, config, grad_scaler)

    def take_parts(self, parts: Sequence[MegatronOptimizer]) -> None:
        """Consist of these from now on: they share this optimizer's loss scale and step mark."""
        self.parts.extend(parts)
        for part in self.parts:
            part.grad_scaler, part.skip_rule = self.grad_scaler, self.skip_rule
            self.early_work.links += part.early_work.links
            self.averages.swaps += part.averages.swaps
            self.averages.shares += part.averages.shares
        self.use_mark(self.step_mark)

    @abstractmethod
    def locate(self, slot: Slot) -> tuple[MegatronOptimizer, Slot]:
        """The part that has a slot, and which of that part's slots it is."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer, if there is only one part.

        Raises:
            AttributeError: with several parts; use ``chained_optimizers``.
        """
        if len(self.parts) == 1:
            return self.parts[0].optimizer
        raise AttributeError(
            "a chain of several optimizers has no single inner one; use .chained_optimizers"
        )

    # -- asked about a slot -----------------------------------------------------------------------

    def state_of(self, slot: Slot) -> SlotState:
        part, part_slot = self.locate(slot)
        return part.state_of(part_slot)

    def main_param(self, slot: Slot) -> Tensor:
        part, part_slot = self.locate(slot)
        return part.main_param(part_slot)

    def norm_key(self, slot: Slot) -> NormKey:
        part, part_slot = self.locate(slot)
        return part.norm_key(part_slot)

    def has_separate_main(self, slot: Slot) -> bool:
        part, part_slot = self.locate(slot)
        return part.has_separate_main(part_slot)

    def has_state(self, slot: Slot) -> bool:
        part, part_slot = self.locate(slot)
        return part.has_state(part_slot)

    # -- asked about some slots, or all -----------------------------------------------------------

    def follow_model(self, slot: Slot | None = None) -> None:
        for part, part_slot in _located(self, slot):
            part.follow_model(part_slot)

    def make_current(self, slot: Slot | None = None) -> None:
        for part, part_slot in _located(self, slot):
            part.make_current(part_slot)

    def allocate_state(self, slots: Sequence[Slot]) -> None:
        located = [self.locate(slot) for slot in slots]
        for part in self.parts:
            part.allocate_state(
                [part_slot for owner, part_slot in located if owner is part]
            )

    # -- asked of all parts -----------------------------------------------------------------------

    def collect_grads(self) -> StepGrads:
        return GradsOfParts([part.collect_grads() for part in self.parts])

    def record(self, verdict: Verdict | DeviceVerdict) -> None:
        super().record(verdict)
        for part in self.parts:
            part.record(verdict)

    def verdict_device(self) -> torch.device | None:
        devices = {
            part.verdict_device() for part in self.parts if not part.is_stub_optimizer
        }
        return devices.pop() if len(devices) == 1 else None

    def settings_alike(self) -> list[SettingsAlike]:
        return [alike for part in self.parts for alike in part.settings_alike()]

    def norm_ranks(self) -> list[ProcessGroup]:
        return [ranks for part in self.parts for ranks in part.norm_ranks()]

    def param_checksums(self) -> list[int | None]:
        return [checksum for part in self.parts for checksum in part.param_checksums()]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            yield from part.named_gradients()

    @property
    def has_quantized_params(self) -> bool:
        return any(part.has_quantized_params for part in self.parts)

    def check_settings(self, group: dict[str, Any]) -> None:
        self.parts[0].check_settings(group)  # the same rule in all

    def step_slots(self, updates: object, *, grad_norm: float | None = None) -> None:
        """Not there: the parts' inner optimizers step slots.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"a {type(self).__name__} is stepped by step(); step the parts' inner optimizers by "
            "slot"
        )

    def share_settings(self) -> None:
        for part in self.parts:
            part.share_settings()  # their groups are these

    @property
    def has_modes(self) -> bool:
        return any(part.has_modes for part in self.parts)

    def switch_mode(self, mode: Mode) -> None:
        with self.step_mark.step(self):
            self.finish_param_sync()
            self.make_current()
            self.step_mark.touch()
            for part in self.parts:
                part.switch_mode(mode)
        self.averages.share()

    def use_mark(self, mark: StepMark) -> None:
        super().use_mark(mark)
        for part in self.parts:
            part.use_mark(mark)

    def recover(self) -> None:
        for part in self.parts:
            part.recover()

    def sharers(self) -> Iterator[tuple[str, tuple[ProcessGroup, ...]]]:
        for part in self.parts:
            yield from part.sharers()

    def take_model_params(self, values: Mapping[str, Any]) -> None:
        for part in self.parts:
            part.take_model_params(values)

    def offload_to_cpu(self) -> None:
        for part in self.parts:
            part.offload_to_cpu()

    def restore_from_cpu(self) -> None:
        for part in self.parts:
            part.restore_from_cpu()

    # -- communication ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The parts' ``no_sync``."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.no_sync())
            yield

    def finish_grad_sync(self) -> None:
        for part in self.parts:
            part.finish_grad_sync()

    def finish_param_sync(self) -> None:
        for part in self.parts:
            part.finish_param_sync()

    # -- what is going on -------------------------------------------------------------------------

    def describe(self) -> Description:
        """The parts' rows, with the groups numbered as they are here."""
        rows: list[DescriptionRow] = []
        notes: list[str] = []
        first_group = 0
        for part in self.parts:
            described = part.describe()
            rows += [row.shifted(first_group) for row in described.rows]
            notes += described.notes
            first_group += len(part.param_groups)
        return Description(tuple(rows), (*notes, *graph_notes(self.graphed)))

    def metrics(self) -> dict[str, float]:
        """The first part's; bytes, times and counts added up over all."""
        metrics = [part.metrics() for part in self.parts]
        names = dict.fromkeys(name for of_part in metrics for name in of_part)
        added = [name for name in names if re.match(_SUMMED, name)]
        totals: dict[str, float] = dict.fromkeys(added, 0)
        for name in added:
            totals[name] = sum(of_part.get(name, 0) for of_part in metrics)
        own = {**graph_metrics(self.graphed), **self.health.metrics()}
        return {**metrics[0], **totals, **own}


def _located(
    composite: CompositeOptimizer, slot: Slot | None
) -> Sequence[tuple[MegatronOptimizer, Slot | None]]:
    """The part that has a slot, and which it is there; all parts for None."""
    if slot is not None:
        return [composite.locate(slot)]
    return [(part, None) for part in composite.parts]
