"""Gradients are downloaded while the device steps its parameters."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from mp_optim.host.transfer import Transfer
from support.models import tokens_of
from support.offload import MODES, build_mode, hybrids

Event = tuple[str, Any]


class RecordingTransfer(Transfer):
    """Transfer that records each mark and the mark that each download waits for."""

    is_same_place = False

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    def mark(self) -> Any:
        self.events.append(("mark", len(self.events)))
        return self.events[-1][1]

    def download(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None) -> None:
        if to and sources[0].numel() > 1:
            self.events.append(("download", after))
        super().download(to, sources)

    def upload(self, to: Sequence[Tensor], sources: Sequence[Tensor], after: Any = None) -> None:
        super().download(to, sources)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("begun", [False, True])
def test_offload_downloads_do_not_wait_for_the_device_step(mode, begun, monkeypatch):
    model, optimizer = build_mode(mode, "fp32", 0.6, experts=False, clip_grad=0.0)
    (hybrid,), events = hybrids(optimizer), list[Event]()
    hybrid.stepper.use_transfer(RecordingTransfer(events), bucket_bytes=64)
    device = hybrid.executor.executors["device"]
    step_slots = device.step_slots

    def recorded(*arguments: Any, **settings: Any) -> None:
        events.append(("device", None))
        step_slots(*arguments, **settings)

    monkeypatch.setattr(device, "step_slots", recorded)
    for step in range(3):
        optimizer.zero_grad()
        optimizer.is_last_microbatch = begun
        model(tokens_of(step)).backward()
        optimizer.discard_backward_work()
        events.clear()
        assert optimizer.step().success
        stepped = events.index(("device", None))
        marks = [index for kind, index in events[:stepped] if kind == "mark"]
        downloads = [after for kind, after in events if kind == "download"]
        assert len(downloads) > 1 and set(downloads) <= set(marks), events
