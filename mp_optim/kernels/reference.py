"""The arithmetic of docs/numerics.md in torch operations.

Every operation is one IEEE operation in FP32, rounded once. Operations that multiply and add with a
single rounding on some devices (addcmul, addcdiv, lerp, ``alpha=``) must not be used in FP32.
Square roots are computed in FP64, because torch's FP32 square root on the CPU is not correctly
rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.core.slot_state import scale_key
from mp_optim.core.tensors import continue_from
from mp_optim.kernels.chunking import (
    Lists,
    batches,
    piece_elements,
    read_mains,
    read_moment,
    take_averages,
    write_mains,
    write_moment,
)
from mp_optim.kernels.codecs import decode, encode_
from mp_optim.kernels.element_rules import (
    ELEMENT_STEPS,
    average,
    average_squares,
    bound,
    bound_all,
    denominators,
    descend,
    gradients,
)
from mp_optim.kernels.kernel_args import RULE_SCALARS, LambScalars, MuonScalars, TensorLists
from mp_optim.kernels.sums import combine_pieces, sum_in_pairs, sum_of_squares

Multiplier = Any
"""Factor of the gradients: a float, or an FP32 tensor for backends with
``takes_device_multipliers``."""


def _directions(batch: TensorLists, mains: Lists, s: LambScalars) -> Lists:
    """Return u = (m * (1/bias1)) / denominator + decay * p, from the stored moments."""
    m = read_moment(batch, "exp_avg")
    u = torch._foreach_mul(m, s.inv_bias1)
    bound_all(u, m)
    torch._foreach_div_(u, denominators(read_moment(batch, "exp_avg_sq"), s))
    if s.decay != 0.0:
        torch._foreach_add_(u, torch._foreach_mul(mains, s.decay))
    return list(u)


class ReferenceBackend:
    """Backend that defines the bits, and base class of all other backends.

    Each method updates all tensors of the lists in place and writes the outputs. Steps also update
    the averages. A subclass overrides the methods for which it has kernels, and calls this class
    for tensors that its kernels do not support.

    :mod:`mp_optim.config.rules` lists the rules and storage formats of backends; a backend that is
    not listed supports all. :mod:`mp_optim.kernels.selection` lists the loaders and devices of
    backends, and the backends that ``auto`` tries. ``auto`` uses a backend only if its self-test
    had the bits of ``reference``. CONTRIBUTING.md lists the tests of a backend.
    """

    name = "reference"

    takes_device_multipliers = False
    """True if a multiplier may be an FP32 tensor on the tensors' device, shape (1,) or (2,).

    If the second element is not 0, the step writes nothing. Such a step never synchronizes.
    """

    interpreted = False
    """True if the kernels are interpreted, which takes a thousand times as long."""

    reads_source = False
    """True if kernels read current values from ``TensorLists.source`` and write new values to other
    memory.

    A step into a back buffer then needs no copy first.
    """

    marks_changes = False
    """True if :meth:`step` sets the bits of ``TensorLists.changed``."""

    follows_weights = False
    """True if :meth:`step` supports ``TensorLists.follows`` and compares main params with the
    model's weights."""

    limits = ""
    """Steps that the backend leaves to ``reference``, as text for reports; empty if there are
    none."""

    # -- rules that step each element independently -----------------------------------------------

    def step(self, rule: str, lists: TensorLists, scalars: Any, multiplier: Multiplier) -> None:
        """Step the lists by a rule of :mod:`~mp_optim.kernels.element_rules`.

        Args:
            rule: name of the rule.
            lists: tensor lists.
            scalars: scalars of the step.
            multiplier: factor of the gradients.
        """
        for _, batch in batches(lists):
            if batch.follows:
                continue_from(batch.main, batch.output)
            ELEMENT_STEPS[rule](batch, scalars, multiplier)

    def prepared(
        self, rule: str, lists: TensorLists, scalars: Any, multiplier: Multiplier
    ) -> Callable[[], None] | None:
        """Return a function without arguments that does :meth:`step`; None if the backend has no
        cached launch for the lists.

        The caller keeps the lists until it has called the function.
        """
        return None

    def prove_at_first_use(self) -> None:
        """Compare each kernel with ``reference`` before the first step that uses the kernel with
        new compile-time constants.

        Only for backends with ``by_form`` in ``selection``. Other backends do nothing.
        """

    def announce(self, lists: TensorLists, scalars: Any, device: torch.device) -> None:
        """Copy the scalars of a step to a device before windows of the lists are copied to the
        device.

        Otherwise the scalars would arrive after all bytes of the first window. Does nothing for a
        backend that passes scalars as arguments.
        """

    # -- LAMB -------------------------------------------------------------------------------------

    def lamb(self, lists: TensorLists, scalars: LambScalars, multiplier: Multiplier) -> None:
        """Step tensors that are whole parameters by LAMB."""
        self.lamb_finish(lists, scalars, self.lamb_moments(lists, scalars, multiplier), multiplier)

    def lamb_moments(
        self, lists: TensorLists, scalars: LambScalars, multiplier: Multiplier
    ) -> Tensor:
        """Update LAMB's moments, and return FP64 sums of p^2 and u^2 for each tensor, shape (n,
        2)."""
        owners: list[int] = []
        squares: list[Tensor] = []
        for own, batch in batches(lists):
            p, m = read_mains(batch), read_moment(batch, "exp_avg")
            v = read_moment(batch, "exp_avg_sq")
            grads = gradients(batch, p, multiplier, scalars.l2)
            average(m, grads, scalars.beta1, scalars.grad_weight)
            bound_all(m, grads)
            average_squares(v, grads, scalars)
            write_moment(batch, "exp_avg", m)
            write_moment(batch, "exp_avg_sq", v)
            sums = sum_of_squares([*p, *_directions(batch, p, scalars)])
            owners += own
            squares.append(sums.view(2, -1).T)
        if not squares:
            device = lists.main[0].device if lists.main else torch.device("cpu")
            return torch.zeros(len(lists.main), 2, dtype=torch.float64, device=device)
        return combine_pieces(owners, torch.cat(squares), len(lists.main))

    def lamb_finish(
        self, lists: TensorLists, scalars: LambScalars, sums: Tensor, multiplier: Multiplier
    ) -> None:
        """Step the main params by LAMB, after :meth:`lamb_moments`.

        Args:
            lists: tensor lists.
            scalars: scalars of the step.
            sums: sums of p^2 and u^2 of whole parameters, FP64, shape (n, 2).
            multiplier: factor of the gradients, which may also skip the step.
        """
        self.lamb_apply(lists, scalars, [scalars.ratio(*row) for row in sums.tolist()])

    def lamb_apply(self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]) -> None:
        """Step the main params by LAMB, each with its FP32 ratio."""
        for owners, batch in batches(lists):
            p = read_mains(batch)
            u = _directions(batch, p, scalars)
            torch._foreach_mul_(u, [ratios[owner] for owner in owners])
            torch._foreach_sub_(p, u)
            write_mains(batch, p)

    # -- Muon's passes over elements, before and after the products -------------------------------

    def muon_momentum(self, lists: TensorLists, scalars: MuonScalars, multiplier: float) -> None:
        """Update Muon's momenta, and write the tensors to orthogonalize into the outputs.

        The lists have no main params.
        """
        scales = lists.state.get(scale_key(MOMENTUM))
        for index, output in enumerate(lists.output):
            assert output is not None
            grad = lists.grad[index].reshape(-1).float()
            if multiplier != 1.0:
                grad = grad * multiplier
            stored = lists.state[MOMENTUM][index].view(-1)
            scale = None if scales is None else scales[index]
            momentum = decode(stored, scale, second=False, numel=grad.numel())
            _blend(momentum, grad, scalars.average, scalars.average_from_end, out=momentum)
            noise = None if lists.noise is None else lists.noise[index]
            encode_(momentum, stored, scale, second=False, noise=noise)
            ahead = momentum
            if scalars.nesterov:
                ahead = torch.empty_like(momentum)
                _blend(grad, momentum, scalars.ahead, scalars.ahead_from_end, out=ahead)
            output.copy_(ahead.view(output.shape))

    def muon_apply(
        self, lists: TensorLists, scalars: MuonScalars, factors: Sequence[float]
    ) -> None:
        """Decay main params, and subtract the directions in ``lists.grad``, each times its FP32
        factor."""
        for index, factor in enumerate(factors):
            one = lists.take([index])
            (main,), (direction,) = read_mains(one), one.grad
            descend([main], [direction.float() * factor], scalars.decay, scalars.cautious_wd)
            write_mains(one, [main])

    # -- averages and sums ------------------------------------------------------------------------

    def average(self, lists: TensorLists) -> None:
        """Update the averages with the current main params. Does nothing without averages.

        Only for rules in torch operations, because the steps of other rules update the averages.
        """
        for _, batch in batches(lists.for_averages()):
            take_averages(batch)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of each tensor, FP64, shape (n,), in the order of
        ``kernels/sums.py``."""
        return sum_of_squares(tensors)

    def sum_in_pairs(self, values: Tensor) -> Tensor:
        """Return the sum of FP64 values, shape (n,), as shape (), added in the order of
        ``kernels/sums.py``."""
        return sum_in_pairs(values)


Backend = ReferenceBackend
"""Type of any backend."""


def step_with(
    backend: Backend,
    rule: str,
    lists: TensorLists,
    group: Mapping[str, Any],
    step: int,
    multiplier: Multiplier,
) -> None:
    """Step whole parameters by a rule, for tests of a backend.

    For a rule that reads sums, the method with the rule's name is called, else :meth:`step`.

    Args:
        backend: the backend.
        rule: name of the rule.
        lists: tensor lists.
        group: settings of the rule.
        step: number of the step, from 1 on.
        multiplier: factor of the gradients.
    """
    scalars = RULE_SCALARS[rule].at(group, step)
    if rule in ELEMENT_STEPS:
        backend.step(rule, lists, scalars, multiplier)
    else:
        method: Callable[..., None] = getattr(backend, rule)
        method(lists, scalars, multiplier)


MOMENTUM = RULES["muon"].moment_names[0]


def _blend(start: Tensor, end: Tensor, factor: float, from_end: bool, out: Tensor) -> None:
    """Write a value between two tensors to ``out``, computed like ``torch.lerp``.

    The value is ``start + factor * (end - start)``, or ``end + factor * (end - start)`` with
    ``from_end``. Overflows of finite values are clamped. The product is exact in FP64, so the
    result equals a fused multiply-add on any device. Orthogonalized values are rounded to bfloat16,
    which would amplify differences in the last bit.

    Args:
        factor: factor of the difference.
        from_end: True to add the product to ``end``, False to add the product to ``start``.
    """
    piece = piece_elements(out.device)
    for at in range(0, out.numel(), piece):
        left, right = start[at : at + piece], end[at : at + piece]
        base, change = right if from_end else left, right - left
        bound(change, left, right)
        out[at : at + piece] = torch.add(base.double(), change.double(), alpha=factor)
