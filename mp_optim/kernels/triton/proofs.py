"""Comparison of each form of the kernels with ``reference`` when a step first needs it."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from mp_optim.core.slot_state import AVERAGE, REMAINDER
from mp_optim.host.calls import in_own_modes, warn
from mp_optim.kernels.kernel_args import AlikeLists
from mp_optim.kernels.reference import ReferenceBackend
from mp_optim.kernels.self_test import Trial, TrialForm, differences, failure, trial_lists

SIZES = (0, 1, 257, 1024 + 256 + 16, 16384, 2 * 8192 + 2048 + 3)
"""Numbers of elements of a trial's tensors.

NOTE: adapt them to the kernels. A whole tile is 1024 elements, and the remainder of a tensor that
ends at a multiple of 16 has its own branch. Chunks of a step are 8192 elements, those of a sum
16384.
"""
INTERPRETED_SIZES = (0, 257)
"""Numbers of elements if kernels are interpreted. A compiler's errors with whole tiles cannot
occur."""
_TINY = 300
"""Number of elements of a trial's last tensor, whose gradients have denormal squares."""


class FormProofs:
    """Results of comparing kernel forms with ``reference``, for the life of the process.

    Attributes:
        is_on: True if forms are compared; otherwise all count as right.
        is_right: result for each compared form, in their order.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.is_right: dict[Any, bool] = {}
        self._lock = threading.RLock()  # a trial may need another form

    def holds(
        self, form: Any, backend: ReferenceBackend, part: AlikeLists, shift: int, trial: Trial
    ) -> bool:
        """Return True if a form of a kernel has the bits of ``reference``; warn if not.

        Args:
            form: equal for launches of one form; its first entry names the kernel.
            backend: the backend with the kernels.
            part: the launch's lists, whose dtypes the trial has.
            shift: elements by which trial tensors begin after a multiple of 16 bytes.
            trial: calls the backend's method on trial lists.
        """
        known = self.is_right.get(form)
        return self._prove(form, backend, part, shift, trial) if known is None else known

    @in_own_modes
    def _prove(
        self, form: Any, backend: ReferenceBackend, part: AlikeLists, shift: int, trial: Trial
    ) -> bool:
        with self._lock:
            if form not in self.is_right:
                self.is_right[form] = True  # the trial itself needs the form
                if wrong := _compare(backend, part, shift, trial):
                    self.is_right[form] = False
                    warn(
                        f"{backend.name} on {part.lists.grad[0].device}, {form[0]}: {wrong}. Such "
                        "steps are taken in torch's operations, one pass over memory for each; "
                        "run mp-optim doctor, or choose fused_backend='reference'"
                    )
            return self.is_right[form]


def _compare(backend: ReferenceBackend, part: AlikeLists, shift: int, trial: Trial) -> str:
    """Return why the bits of a trial are not those of ``reference``; empty if they are."""
    (_, kind, lists), device = part, part.lists.grad[0].device
    assert kind is not None
    state = {key: some[0].dtype for key, some in lists.state.items() if some}
    moments = {key: state[key] for key in state if key not in (REMAINDER, AVERAGE)}
    follows = lists.follows and kind.compares_weights
    form = TrialForm(kind, moments, bool(lists.noise), lists.average_weight, follows)
    sizes = (*(INTERPRETED_SIZES if backend.interpreted else SIZES), _TINY)
    try:
        make_lists = partial(trial_lists, form, device, sizes, shift, last_grad=1e-20)
        found = differences(backend, make_lists, trial)
    except Exception as error:
        return failure(error)
    return "other bits than reference at its first use" if found else ""
