"""The schedule of ``speculative`` that the documents compare with those of
``mp_optim.apps.fit.step_time``, and the forms of state that their tables show."""

from __future__ import annotations

from mp_optim.apps.fit.step_time import GRAD, Form, Lanes, Machine, Schedule, buckets

SCALES = 2 * 4 / 256
"""Two 8-bit moments: an FP32 scale for each block of 256."""

FORMS = (
    Form("FP32", 12, reads_param=False),
    Form("bf16 moments, 16-bit remainder", 6, reads_param=True),
    Form("8-bit moments, 16-bit remainder", 4 + SCALES, reads_param=True),
)


def behind_backward(machine: Machine, form: Form, params: int, backward: float) -> Schedule:
    """``speculative``: gradients come evenly during ``backward`` seconds, each bucket is measured
    and stepped as it comes, and all params go up once backward is over and everything is
    measured."""
    schedule, lanes = Schedule(), Lanes.of(machine, streams=False)
    counts = list(buckets(params))
    stepped = []
    for index, count in enumerate(counts):
        ready = backward * (index + 1) / len(counts)
        there = schedule.add(lanes.down, count * GRAD, earliest=ready)
        traffic = count * (form.on_host - GRAD)
        stepped.append(schedule.add(lanes.host, traffic, (there,)))
    for count in counts:
        # The verdict needs every gradient: the last come as backward ends.
        schedule.add(lanes.host, count * GRAD, stepped[-1:])
        schedule.add(lanes.up, count * GRAD, stepped[-1:])
    return schedule
