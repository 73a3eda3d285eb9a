"""What a backend is, and how one is added.

A new backend is a class with what :class:`Backend` declares, best derived from
:class:`~mp_optim.update.backends.reference.ReferenceBackend`, which does what it leaves out; its
name, and the rules and states it has kernels for, in :mod:`mp_optim.config.rules` (one that
names none claims all); and how it is loaded, on which devices, and whether ``auto`` may choose it,
in :mod:`mp_optim.update.backends.selection`. ``auto`` takes only what has shown the bits of the
reference in its self-test. A ``capturable`` one is also let into the check of
``optimizer_cuda_graph`` in :mod:`mp_optim.config.combinations`. CONTRIBUTING.md lists the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mp_optim.update.element_rules import SCALARS, TEXTS
from mp_optim.update.kernel_args import LambScalars, MuonScalars, StableScalars, TensorLists

Multiplier = Any
"""A float; or also a tensor, for backends that say so by ``takes_device_multipliers``."""


class Backend(Protocol):
    """Each method updates every tensor of the lists in place and writes the outputs, and what takes
    the step lets the averages take the new main params, too (``TensorLists.average_weight``)."""

    name: str

    takes_device_multipliers: bool
    """Whether a multiplier may also be an FP32 tensor on the tensors' device, shape (1,) or (2,):
    the second element is not 0 if nothing is to be written. Such a step never waits for the
    device."""

    capturable: bool
    """Whether a CUDA graph can hold its steps, and replay them with other numbers: then it has
    ``rehearse()`` and ``record()`` too (``mp_optim/precision/graph_step.py``)."""

    interpreted: bool
    """Whether its kernels are interpreted, which takes a thousand times as long."""

    reads_source: bool
    """Whether it reads present values from ``TensorLists.source`` and writes new ones elsewhere, so
    that a step into a back buffer needs no copy first."""

    limits: str
    """What it hands to ``reference``, for reports; empty if nothing."""

    def step(self, rule: str, lists: TensorLists, scalars: Any, multiplier: Multiplier) -> None:
        """Carry out a rule of :mod:`~mp_optim.update.element_rules`, with its scalars."""
        ...

    def lamb(self, lists: TensorLists, scalars: LambScalars, multiplier: Multiplier) -> None:
        """The whole step, for tensors that are whole parameters."""
        ...

    def lamb_finish(
        self, lists: TensorLists, scalars: LambScalars, sums: Tensor, multiplier: Multiplier
    ) -> None:
        """Take the step after :meth:`lamb_moments`, from sums of whole parameters, shape (n, 2)
        FP64."""
        ...

    def lamb_moments(
        self, lists: TensorLists, scalars: LambScalars, multiplier: Multiplier
    ) -> Tensor:
        """Update the moments; return FP64 (sum p^2, sum u^2) per tensor, shape (n, 2)."""
        ...

    def lamb_apply(self, lists: TensorLists, scalars: LambScalars, ratios: Sequence[float]) -> None:
        """Take the step, each tensor with its own ratio (FP32 value)."""
        ...

    def stable_adamw(
        self, lists: TensorLists, scalars: StableScalars, multiplier: Multiplier
    ) -> None:
        """The whole step, for tensors that are whole parameters."""
        ...

    def stable_adamw_sums(
        self, lists: TensorLists, scalars: StableScalars, multiplier: Multiplier
    ) -> Tensor:
        """For each tensor the sum of g^2 over the new second moment, as whole numbers, and how many
        of these are NaN (``exact_sums.bounded_sum``): int64, shape (n, 3), on the tensors'
        device. Writes nothing."""
        ...

    def stable_adamw_finish(
        self,
        lists: TensorLists,
        scalars: StableScalars,
        sums: Tensor,
        sizes: Sequence[int],
        multiplier: Multiplier,
    ) -> Sequence[bool] | Tensor | None:
        """Take the step, from sums and numbers of elements of whole parameters; says which of them
        are clipped, on the device where that is formed there, None if nothing is stepped."""
        ...

    def muon_momentum(self, lists: TensorLists, scalars: MuonScalars, multiplier: float) -> None:
        """Update the momenta. The lists have no main params; the outputs receive what is to be
        orthogonalised."""
        ...

    def muon_apply(
        self, lists: TensorLists, scalars: MuonScalars, factors: Sequence[float]
    ) -> None:
        """Decay main params and subtract directions, which are ``lists.grad``, each times its
        factor, an FP32 value."""
        ...

    def average(self, lists: TensorLists) -> None:
        """Let the averages take the main params that are there, for rules in torch operations; the
        methods of the other rules do so themselves. Nothing to do where none are kept."""
        ...

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """FP64, shape (n,)."""
        ...


def step_with(
    backend: Backend,
    rule: str,
    lists: TensorLists,
    group: Mapping[str, Any],
    step: int,
    multiplier: Multiplier,
) -> None:
    """Let a backend carry out a rule for whole parameters, with scalars of a param group at step
    ``step`` >= 1; a rule that reads sums by the method of its name."""
    scalars = SCALARS[rule].at(group, step)
    if rule in TEXTS:
        backend.step(rule, lists, scalars, multiplier)
    else:
        method: Callable[..., None] = getattr(backend, rule)
        method(lists, scalars, multiplier)
