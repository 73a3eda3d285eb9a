"""Calls that a signal interrupts."""

from __future__ import annotations

import copy
import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from lab.any_program.oracle import Oracle
from lab.any_program.subject import Subject
from mp_optim.core.interrupted_step import BrokenOffError


@contextmanager
def signal_at(line: int) -> Iterator[None]:
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if "mp_optim" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if left < 0 and not _leaves_a_block(frame):
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _leaves_a_block(frame: FrameType) -> bool:
    """Whether the call that ends a ``with`` comes next. Python looks for signals after calls and
    where it jumps back, and the last of these was inside of the block: none comes in between."""
    coming = [step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti]
    return all(
        step.opname in ("POP_BLOCK", "DUP_TOP", "ROT_TWO", "SWAP")
        or (step.opname.startswith("LOAD_CONST") and step.argval is None)
        for step in coming[:3]
    )


def interrupted(
    subject: Subject, oracle: Oracle, call: Callable[[], Any], then: Oracle, line: int
) -> Oracle:
    """Carry out a call that a signal may interrupt; return the oracle before or after it.

    Args:
        then: the oracle after the call.
    """
    weights = copy.deepcopy(subject.model.state_dict())
    state = copy.deepcopy(subject.optimizer.state_dict())
    try:
        with signal_at(line):
            call()
        return then
    except KeyboardInterrupt:
        torch.set_grad_enabled(True)  # a signal in the door that leaves torch's modes
    try:
        found = subject.optimizer.state_dict()
    except BrokenOffError:
        subject.model.load_state_dict(weights)
        subject.optimizer.load_state_dict(state)
        subject.check_state_dict(oracle, subject.optimizer.state_dict())
        return oracle
    for held in (oracle, then):
        try:
            subject.check_state_dict(held, found)
            subject.check_model(held)
            return held
        except AssertionError as error:
            last = error
    raise AssertionError(f"half of a call is done, and nothing says so: {last}")
