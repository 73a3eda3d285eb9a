"""Compares each form of the kernels with ``reference`` when a step first needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.state_forms import BLOCK, blocks_of, packed_bytes
from mp_optim.core.slot_state import AVERAGE, REMAINDER, SECOND, is_scale, scale_key
from mp_optim.host.calls import in_own_modes, warn
from mp_optim.kernels.codecs import Noise, encode_, is_packed, split_
from mp_optim.kernels.kernel_args import AlikeLists, TensorLists
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.self_test import Deviation, failure, values_of

Trial = Callable[[ReferenceBackend, TensorLists], Tensor | None]
"""Calls the method of a backend that is about to be called, over other lists; returns its result if
it has one."""
SIZES = (0, 1, 257, 1024 + 256 + 16, 16384, 2 * 8192 + 2048 + 3)
"""Elements of the tensors that a form is tried on.

NOTE: they follow the kernels, and change with them: a whole tile is 1024 elements, and the rest of
a tensor that ends at a multiple of 16 has a branch of its own; chunks of a step are 8192 elements,
those of a sum 16384.
"""
INTERPRETED_SIZES = (0, 257)
"""The same where kernels are interpreted: nothing is compiled that could be wrong from a whole tile
on."""
_TINY = 300
"""Elements of the last tensor of a trial, whose gradients have denormal squares."""


class FormProofs:
    """What was found out about forms of kernels in this process.

    Attributes:
        is_on: whether forms are compared; else all are taken for right.
        taken: the forms that were compared, in their order.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.taken: list[Any] = []
        self._is_right: dict[Any, bool] = {}
        self._lock = threading.RLock()  # a trial may need another form

    def holds(
        self, form: Any, backend: ReferenceBackend, part: AlikeLists, shift: int, trial: Trial
    ) -> bool:
        """Return whether a form of a kernel has the bits of ``reference``; warn if it has not.

        Args:
            form: equal for launches of one form.
            backend: with the kernels. part: of the launch, whose dtypes the trial has.
            shift: elements by which trial tensors begin after a multiple of 16 bytes.
        """
        known = self._is_right.get(form)
        if known is None:
            known = self._prove(form, backend, part, shift, trial)
        return known

    @in_own_modes
    def _prove(
        self, form: Any, backend: ReferenceBackend, part: AlikeLists, shift: int, trial: Trial
    ) -> bool:
        with self._lock:
            if form not in self._is_right:
                self._is_right[form] = True  # while it is tried
                self.taken.append(form)
                wrong = _compare(backend, part, shift, trial)
                self._is_right[form] = not wrong
                if wrong:
                    warn(
                        f"{backend.name} on {part.lists.grad[0].device}, {form[0]}: {wrong}. Such "
                        "steps are taken in torch's operations, one pass over memory for each; "
                        "run mp-optim doctor, or choose fused_backend='reference'"
                    )
            return self._is_right[form]


def _compare(backend: ReferenceBackend, part: AlikeLists, shift: int, trial: Trial) -> str:
    """Return why the bits of a trial are not those of ``reference``; empty if they are."""
    found = Deviation()
    try:
        sizes = INTERPRETED_SIZES if backend.interpreted else SIZES
        ours, theirs = (trial_lists(part, (*sizes, _TINY), shift) for _ in range(2))
        mine, others = trial(backend, ours), trial(ReferenceBackend(), theirs)
        found.lists(ours, theirs, 1.0)
        if mine is not None and others is not None:
            found.others(mine.cpu(), others.cpu())
    except Exception as error:
        return failure(error)
    return "" if found.same else "other bits than reference at its first use"


def trial_lists(part: AlikeLists, sizes: tuple[int, ...], shift: int) -> TensorLists:
    """Return lists of the dtypes of a launch's, with values that are the same at every call."""
    kind, lists = part.kind, part.lists
    assert kind is not None
    device, state = lists.grad[0].device, dict[str, list[Tensor]]()
    whole = [values_of(size, 2 * index, device) for index, size in enumerate(sizes)]
    grads = [values_of(size, 2 * index + 1, device) for index, size in enumerate(sizes)]
    grads[-1] = grads[-1] * 1e-20
    mains: list[Tensor] = []
    if kind.main is not None:
        mains = [_shifted(value, kind.main, shift) for value in whole]
    if kind.remainder is not None:
        state[REMAINDER] = [_shifted(value * 0.0, kind.remainder, shift) for value in whole]
        for value, main, rest in zip(whole, mains, state[REMAINDER], strict=True):
            split_(value, main, rest)
    for key in lists.state:
        if key in (REMAINDER, AVERAGE) or not lists.state[key] or is_scale(key):
            continue
        dtype, is_second = lists.state[key][0].dtype, key == SECOND
        scales: list[Tensor | None] = [None] * len(whole)
        if scale_key(key) in lists.state:
            scales = [
                torch.zeros(blocks_of(size), dtype=torch.float32, device=device) for size in sizes
            ]
            state[scale_key(key)] = [scale for scale in scales if scale is not None]
        rooms = [packed_bytes(size) if is_packed(key, dtype) else size for size in sizes]
        state[key] = [
            _shifted(torch.zeros(room, dtype=torch.float32, device=device), dtype, shift)
            for room in rooms
        ]
        for value, stored, scale in zip(whole, state[key], scales, strict=True):
            before = value.square() * 2.0**-20 if is_second else value * 0.25
            encode_(before, stored, scale, is_second)
    if kind.average is not None:
        state[AVERAGE] = [_shifted(value.flip(0), kind.average, shift) for value in whole]
    outputs: list[Tensor | None] = [None] * len(whole)
    if kind.output is not None:
        written = torch.arange(BLOCK, device=device) % 5 != 0
        weights = [each * written.repeat(blocks_of(len(each)))[: len(each)] for each in whole]
        outputs = [_shifted(value, kind.output, shift) for value in weights]
    noise = [Noise(0x9ABCDEF1, 77 + index, 256 * index) for index in range(len(whole))]
    return TensorLists(
        mains,
        [_shifted(value, kind.grad, shift) for value in grads],
        {key: state[key] for key in lists.state if key in state},
        outputs,
        noise=noise if lists.noise else None,
        average_weight=lists.average_weight,
        follows=lists.follows and kind.compares_weights,
    )


def _shifted(values: Tensor, dtype: torch.dtype, shift: int) -> Tensor:
    """Return a copy that begins ``shift`` elements into its storage."""
    memory = torch.zeros(len(values) + shift, dtype=dtype, device=values.device)
    return memory[shift:].copy_(values)
