"""The rules as torch optimizers: ``AdamW(params, lr=1e-3, ...)``.

Hyperparameters and their defaults are torch's where torch has the rule, else those of its paper. By
name they also take :class:`~mp_optim.optimizers.settings.StackSettings`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from mp_optim.core.param_attributes import is_expert_param
from mp_optim.host.calls import warn
from mp_optim.optimizers.base import StackOptimizer
from mp_optim.optimizers.settings import StackSettings, with_settings
from mp_optim.param_groups.tables import (
    Tables,
    choice_notes,
    is_hidden_matrix,
    module_of,
    warn_of_table_shape,
)

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Lion", "Muon"]

Betas = tuple[float, float]

_log = logging.getLogger(__name__)


@with_settings
class Adam(StackOptimizer):
    """Adam (Kingma & Ba 2015), as torch's.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        betas: decay of the first and of the second moment.
        eps: number that is added to the denominator.
        weight_decay: factor of the parameter that is added to its gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **settings: Unpack[StackSettings],
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**values, "adam_w_mode": False}, settings)


@with_settings
class AdamW(StackOptimizer):
    """AdamW (Loshchilov & Hutter 2019), as torch's: each parameter of a group decays.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        betas: decay of the first and of the second moment.
        eps: number that is added to the denominator.
        weight_decay: factor of the decoupled weight decay.
        caution: whether updates are cautious (Liang et al. 2024; the name is timm's).
        cautious_wd: whether weight decay is cautious (Chen et al. 2025; the name is dion's).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        caution: bool = False,
        cautious_wd: bool = False,
        **settings: Unpack[StackSettings],
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        switches = {"adam_w_mode": True, "caution": caution, "cautious_wd": cautious_wd}
        super().__init__(params, {**values, **switches}, settings)


@with_settings
class LAMB(StackOptimizer):
    """LAMB (You et al. 2020), as apex has it. ``max_grad_norm`` does the clipping.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        betas: decay of the first and of the second moment.
        eps: number that is added to the denominator.
        weight_decay: factor of the decoupled weight decay.
        grad_averaging: whether the first moment weighs the gradient with ``1 - beta1``.
        use_nvlamb: whether the learning rate is also adapted where ``weight_decay`` is 0.
    """

    rule = "lamb"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        grad_averaging: bool = True,
        use_nvlamb: bool = False,
        **settings: Unpack[StackSettings],
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        switches = {"grad_averaging": grad_averaging, "use_nvlamb": use_nvlamb}
        super().__init__(params, {**values, **switches}, settings)


@with_settings
class Lion(StackOptimizer):
    """Lion (Chen et al. 2023).

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        betas: weight of the momentum in the step's direction, and decay of the momentum.
        weight_decay: factor of the decoupled weight decay.
        caution: whether updates are cautious (Liang et al. 2024; the name is timm's).
        cautious_wd: whether weight decay is cautious (Chen et al. 2025; the name is dion's).
    """

    rule = "lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        caution: bool = False,
        cautious_wd: bool = False,
        **settings: Unpack[StackSettings],
    ) -> None:
        values = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        switches = {"caution": caution, "cautious_wd": cautious_wd}
        super().__init__(params, {**values, **switches}, settings)


@with_settings
class SGD(StackOptimizer):
    """Gradient descent with momentum, as torch's.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        momentum: decay of the momentum; 0 keeps none.
        dampening: share of a gradient that is left out of the momentum.
        weight_decay: factor of the parameter that is added to its gradient.
        nesterov: whether the momentum is Nesterov's.
    """

    rule = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **settings: Unpack[StackSettings],
    ) -> None:
        values = {"lr": lr, "momentum": momentum, "dampening": dampening}
        rest = {"weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {**values, **rest}, settings)


@with_settings
class Muon(StackOptimizer):
    """Muon (Jordan 2024) for matrices, AdamW for the rest, with one learning rate for both.

    A group is taken apart: its matrices that are neither embeddings nor output layers are Muon's,
    and what is left becomes a group of its own. ``describe()`` lists both, with the reasons. The
    model's modules tell embeddings and output layers: pass ``model.named_parameters()`` as it
    comes, or ``model=``. Without the modules the names tell them: those of the usual families. A
    group with ``optimizer="adam"`` (or ``use_muon=False``) is AdamW's in any case.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        weight_decay: factor of the decoupled weight decay, of both rules.
        momentum: decay of Muon's momentum.
        nesterov: whether Muon's momentum is Nesterov's.
        ns_steps: number of Newton-Schulz steps.
        adjust_lr_fn: factor of the learning rate of a matrix. None (as torch's) and
            ``"original"``: sqrt(max(1, rows / columns)). ``"match_rms_adamw"``: 0.2 *
            sqrt(max(rows, columns)), so that steps are as long as AdamW's, and its learning rate
            can be kept.
        betas: decay of AdamW's first and second moment.
        eps: number that is added to AdamW's denominator. (torch's Muon, which has no AdamW, calls a
            constant of Newton-Schulz so.)
        caution: whether updates of both rules are cautious, as of AdamW.
        cautious_wd: whether weight decay of both rules is cautious, as of AdamW.
        moment2_method: ``"normuon"`` divides each row of a step, a neuron, by the root of an
            average of its squares, and keeps the step's norm (Li et al. 2025); None does not.
        beta2: decay of this average.
        model: module that holds the parameters, for lists and groups of them. The optimizer does
            not keep it alive.
    """

    rule = "muon"
    _modules: tuple[weakref.ref[nn.Module], ...] = ()
    """The modules that hold the parameters, as far as they are known."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        caution: bool = False,
        cautious_wd: bool = False,
        moment2_method: str | None = None,
        beta2: float = 0.95,
        model: nn.Module | None = None,
        **settings: Unpack[StackSettings],
    ) -> None:
        self._remember(model)
        self._remember(module_of(params))
        scales: dict[str | None, tuple[str, float]] = {
            None: ("shape_scaling", 1.0),
            "original": ("shape_scaling", 1.0),
            "match_rms_adamw": ("spectral", 0.2),
        }
        if adjust_lr_fn not in scales:
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}: must be one of {list(scales)}")
        mode, factor = scales[adjust_lr_fn]
        values = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        of_muon = {
            "momentum": momentum,
            "nesterov": nesterov,
            "num_ns_steps": ns_steps,
            "coefficient_type": "simple",
            "scale_mode": mode,
            "extra_scale_factor": factor,
            "moment2_method": moment2_method,
            "beta2": beta2,
        }
        switches = {"caution": caution, "cautious_wd": cautious_wd}
        super().__init__(params, {**values, **of_muon, **switches}, settings)
        for line in self.choice_notes():
            _log.info(line)

    def arranged(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        self._remember(module_of(group["params"]))
        return by_rule({**group, "params": _members(group["params"])}, self._tables())

    def choice_notes(self) -> tuple[str, ...]:
        return choice_notes(self.param_groups, self._tables())

    def _remember(self, module: nn.Module | None) -> None:
        if module is not None:
            self._modules = (*self._modules, weakref.ref(module))

    def _tables(self) -> Tables:
        modules = (ref() for ref in self._modules)
        return Tables([module for module in modules if module is not None])


NamedTensor = tuple[str, Tensor]


def by_rule(group: dict[str, Any], tables: Tables) -> list[dict[str, Any]]:
    """A group as one or two: Muon's matrices, and the rest.

    Args:
        group: its ``params`` as a list.
        tables: the embeddings and output layers of the model.
    """
    settings = {key: value for key, value in group.items() if key not in ("params", "use_muon")}
    chosen = group.get("optimizer", {False: "adam"}.get(group.get("use_muon", True)))
    if chosen is not None:
        return [{**settings, "params": group["params"], "optimizer": chosen}]
    parts: dict[str, list[Tensor | NamedTensor]] = {"muon": [], "adam": []}
    for member in group["params"]:
        name, param = ("", member) if isinstance(member, Tensor) else member
        is_muons = is_hidden_matrix(param, name, is_expert_param(param, name), tables)
        parts["muon" if is_muons else "adam"].append(member)
    for member in parts["muon"]:
        if not isinstance(member, Tensor):
            warn_of_table_shape(member[1], tables.name_of(member[1], member[0]))
    if any(isinstance(member, Tensor) and not tables.knows(member) for member in parts["muon"]):
        warn(
            "Muon was given parameters without names, so every matrix is stepped by it, embeddings "
            "and output layers too: pass model.named_parameters(), or model=model, or a group with "
            'optimizer="adam" for those'
        )
    split = [{**settings, "params": parts[rule], "optimizer": rule} for rule in parts]
    return [part for part in split if part["params"]] or split[:1]


def _members(params: Any) -> list[Tensor | NamedTensor]:
    return [params] if isinstance(params, Tensor) else list(params)
