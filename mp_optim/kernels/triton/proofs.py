"""Comparison of the kernels with ``reference``, when a step first uses a form of a kernel.

A form is a kernel with its compile-time constants, on a device and with an alignment.
"""

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

NOTE: change these sizes together with the kernels. A whole tile has 1024 elements. The rest of a
tensor that ends at a multiple of 16 has its own branch. Steps have chunks of 8192 elements, sums
have chunks of 4096.
"""
INTERPRETED_SIZES = (0, 257)
"""Numbers of elements for interpreted kernels, which need no whole tiles: no compiler can
miscompile the loop over tiles."""
_TINY = 300
"""Number of elements of a trial's last tensor. Its gradients have denormal squares."""


class FormProofs:
    """Results of comparing forms of kernels with ``reference``, kept for the life of the process.

    Attributes:
        is_on: True to compare forms; False to trust all forms.
        is_right: result by form, in the order of comparison.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.is_right: dict[Any, bool] = {}
        # A trial may use another form and compare that form, too, so the lock must be reentrant.
        self._lock = threading.RLock()

    def holds(
        self, form: Any, backend: ReferenceBackend, part: AlikeLists, shift: int, trial: Trial
    ) -> bool:
        """True if a form of a kernel has the bits of ``reference``. The first use of a form with
        other bits warns.

        Args:
            form: key that is equal for all launches of the form. The first entry is the kernel's
                name.
            backend: the backend with the kernels.
            part: lists of the launch. The trial has lists of equal dtypes.
            shift: number of elements between a multiple of 16 bytes and the start of each trial
                tensor.
            trial: function that calls the backend's method on trial lists.
        """
        known = self.is_right.get(form)
        return self._prove(form, backend, part, shift, trial) if known is None else known

    @in_own_modes
    def _prove(
        self, form: Any, backend: ReferenceBackend, part: AlikeLists, shift: int, trial: Trial
    ) -> bool:
        with self._lock:
            if form not in self.is_right:
                # Trust the form during the trial, because the trial launches the form.
                self.is_right[form] = True
                if wrong := _compare(backend, part, shift, trial):
                    self.is_right[form] = False
                    warn(
                        f"{backend.name} on {part.lists.grad[0].device}, {form[0]}: the check of "
                        f"these kernels failed ({wrong}), so such steps run torch's operations, "
                        "one pass over memory for each; run mp-optim doctor, or set "
                        "fused_backend='reference'"
                    )
            return self.is_right[form]


def _compare(backend: ReferenceBackend, part: AlikeLists, shift: int, trial: Trial) -> str:
    """Return the reason why a form's bits differ from ``reference``; empty for equal bits."""
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
