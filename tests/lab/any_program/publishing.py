"""Published weight changes, applied to a copy of the weights."""

from __future__ import annotations

import torch

from lab.any_program.subject import Subject
from mp_optim import WeightDelta, apply_delta
from support.deltas import differing

__all__ = ["Published"]


class Published:
    """A copy of a subject's weights.

    Attributes:
        subject: the owner of the tracked changes.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        subject.optimizer.track_changes()
        self._after: tuple[str, ...] | None = None
        self._copies = {name: param.detach().clone() for name, param in self._params().items()}

    def _params(self) -> dict[str, torch.Tensor]:
        named = {id(param): name for name, param in self.subject.params()}
        groups = self.subject.optimizer.param_groups
        return {named[id(param)]: param for group in groups for param in group["params"]}

    def take(self, full: bool) -> None:
        delta = WeightDelta.from_bytes(self.subject.optimizer.changed_weights(full=full).to_bytes())
        params = self._params()
        for name, param in params.items():  # of groups that were added
            self._copies.setdefault(name, torch.zeros_like(param))
        self._after = apply_delta(self._copies, delta, self._after)
        for name, param in params.items():
            missed = int(differing(param.detach(), self._copies[name]).sum())
            assert not missed, f"{name}: {missed} of {param.numel()} changed and were not published"
