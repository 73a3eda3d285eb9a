"""Published weight changes of a program."""

from __future__ import annotations

import torch

from lab.any_program.subject import Subject
from lab.published import Receiver
from mp_optim import WeightDelta
from support.deltas import differing


class Published(Receiver):
    """A copy of a subject's weights.

    Attributes:
        subject: the owner of the tracked changes.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        subject.optimizer.track_changes()
        copies = {name: param.detach().clone() for name, param in self._params().items()}
        super().__init__(copies, subject.setup.seed // 2)

    def _params(self) -> dict[str, torch.Tensor]:
        named = {id(param): name for name, param in self.subject.params()}
        groups = self.subject.optimizer.param_groups
        return {named[id(param)]: param for group in groups for param in group["params"]}

    def publish(self, full: bool) -> None:
        delta = self.subject.optimizer.changed_weights(full=full)
        for name, param in self._params().items():  # of groups that were added
            self.copies.setdefault(name, torch.zeros_like(param))
        self.take([WeightDelta.from_bytes(delta.to_bytes())])
        for name, param in self._params().items():
            missed = int(differing(param.detach(), self.copies[name]).sum())
            assert not missed, f"{name}: {missed} of {param.numel()} changed and were not published"
