"""Optimizers with torch's signature: ``AdamW(params, lr=1e-3, ...)``.

Hyperparameters have torch's names and defaults if torch has the optimizer, and else those of the
optimizer's paper. Each class also has the keyword arguments of
:class:`~mp_optim.optimizers.settings.StackSettings`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from mp_optim.config import OptimizerConfig
from mp_optim.core.param_attributes import is_expert_param
from mp_optim.host.calls import warn
from mp_optim.mixed_precision import Float16OptimizerWithFloat16Params
from mp_optim.offload.hybrid import HybridDeviceOptimizer
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
    """Adam (Kingma & Ba 2015) with the formula of ``torch.optim.Adam``.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        betas: decay per step of the first and of the second moment, each in [0, 1).
        eps: number added to the denominator.
        weight_decay: factor of the L2 penalty: the parameter times this factor is added to the
            gradient.
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
    """AdamW (Loshchilov & Hutter 2019) with the formula of ``torch.optim.AdamW``.

    Weight decay applies to every parameter of a group, biases and norms included.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        betas: decay per step of the first and of the second moment, each in [0, 1).
        eps: number added to the denominator.
        weight_decay: factor of the decoupled weight decay.
        cautious_wd: True for cautious weight decay (Chen et al. 2025): an element decays only if
            the update does not move it away from 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        cautious_wd: bool = False,
        **settings: Unpack[StackSettings],
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        switches = {"adam_w_mode": True, "cautious_wd": cautious_wd}
        super().__init__(params, {**values, **switches}, settings)


@with_settings
class LAMB(StackOptimizer):
    """LAMB (You et al. 2020) with the formula of ``apex.optimizers.FusedLAMB``.

    Gradients are clipped only if ``max_grad_norm`` is set; apex's class always clips.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        betas: decay per step of the first and of the second moment, each in [0, 1).
        eps: number added to the denominator.
        weight_decay: factor of the decoupled weight decay.
        grad_averaging: True to multiply the gradient by ``1 - beta1`` in the first moment.
        use_nvlamb: True to adapt the learning rate of parameters without weight decay, too.
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
    """Lion (Chen et al. 2023): steps by the sign of a weighted sum of momentum and gradient.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        betas: weight of the momentum in the update direction, and decay per step of the momentum,
            each in [0, 1).
        weight_decay: factor of the decoupled weight decay.
        cautious_wd: True for cautious weight decay (Chen et al. 2025): an element decays only if
            the update does not move it away from 0.
    """

    rule = "lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        cautious_wd: bool = False,
        **settings: Unpack[StackSettings],
    ) -> None:
        values = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        switches = {"cautious_wd": cautious_wd}
        super().__init__(params, {**values, **switches}, settings)


@with_settings
class SGD(StackOptimizer):
    """Gradient descent with momentum, with the formula of ``torch.optim.SGD``.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate, a number or a tensor.
        momentum: decay per step of the momentum; 0 keeps no momentum.
        dampening: share of a gradient that is not added to the momentum.
        weight_decay: factor of the L2 penalty: the parameter times this factor is added to the
            gradient.
        nesterov: True for Nesterov momentum.
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
    """Muon (Jordan 2024) for hidden matrices and AdamW for all other parameters.

    The constructor splits each param group in two. Muon steps the matrices that are neither
    embeddings nor output layers; AdamW steps the other parameters. ``describe()`` lists both groups
    with the reasons. A group with ``optimizer="adam"`` or ``use_muon=False`` is not split: AdamW
    steps the whole group.

    The modules of the model show which parameters are embeddings and output layers. So pass
    ``model.named_parameters()`` itself, or ``model=``. Without modules, the parameter names of
    common model families decide.

    Args:
        params: parameters, named parameters or param groups; bf16, fp16 and FP32 in any mix.
        lr: learning rate of both rules, a number or a tensor.
        weight_decay: factor of the decoupled weight decay of both rules.
        momentum: decay per step of Muon's momentum.
        nesterov: True for Nesterov momentum in Muon.
        ns_steps: number of Newton-Schulz steps.
        adjust_lr_fn: factor of a matrix's learning rate. None and ``"original"``: sqrt(max(1, rows
            / columns)). ``"match_rms_adamw"``: 0.2 * sqrt(max(rows, columns)), which makes updates
            as large as AdamW's, so that AdamW's learning rate fits.
        betas: decay per step of AdamW's first and second moment.
        eps: number added to AdamW's denominator. In ``torch.optim.Muon`` the argument of this name
            is a constant of Newton-Schulz.
        cautious_wd: True for cautious weight decay (Chen et al. 2025) in both rules: an element
            decays only if the update does not move it away from 0.
        moment2_method: None for plain Muon, or ``"normuon"`` (Li et al. 2025), which divides each
            row of an update by the root of a moving average of the row's mean square, and keeps the
            norm of the update.
        beta2: decay per step of the moving average of ``moment2_method``.
        model: module that holds the parameters, needed if ``params`` is a list or has groups. The
            optimizer stores a weak reference to the module.
    """

    rule = "muon"
    _modules: tuple[weakref.ref[nn.Module], ...] = ()
    """Weak references to the modules known to hold the parameters."""

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
        switches = {"cautious_wd": cautious_wd}
        super().__init__(params, {**values, **of_muon, **switches}, settings)
        for line in self.choice_notes():
            _log.info(line)

    def arranged(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Split a param group by ``overrides``. Then split each part into matrices for Muon and
        other parameters for AdamW, unless the part has ``optimizer`` or ``use_muon=False``."""
        params = group["params"]
        self._remember(module_of(params))
        members = [params] if isinstance(params, Tensor) else list(params)
        tables, split = self._tables(), list[dict[str, Any]]()
        for part in super().arranged({**group, "params": members}):
            settings = {key: part[key] for key in part if key not in ("params", "use_muon")}
            chosen = part.get("optimizer", {False: "adam"}.get(part.get("use_muon", True)))
            if chosen is not None:
                split.append({**settings, "params": part["params"], "optimizer": chosen})
                continue
            parts: dict[str, list[Any]] = {"muon": [], "adam": []}
            for member in part["params"]:
                name, param = ("", member) if isinstance(member, Tensor) else member
                is_muons = is_hidden_matrix(param, name, is_expert_param(param, name), tables)
                parts["muon" if is_muons else "adam"].append(member)
                if is_muons and not isinstance(member, Tensor):
                    warn_of_table_shape(param, tables.name_of(param, name))
            unnamed = [member for member in parts["muon"] if isinstance(member, Tensor)]
            if not all(tables.name_of(param, "") for param in unnamed):
                warn(
                    "Muon was given parameters without names, so it steps every matrix, embeddings "
                    "and output layers too: pass model.named_parameters(), or model=model, or put "
                    'embeddings and output layers into a group with optimizer="adam"'
                )
            # A group without parameters stays one group.
            kept = [rule for rule in parts if parts[rule]] or ["muon"]
            split += [{**settings, "params": parts[rule], "optimizer": rule} for rule in kept]
        return split

    def choice_notes(self) -> tuple[str, ...]:
        return choice_notes(self.param_groups, self._tables())

    def _remember(self, module: nn.Module | None) -> None:
        if module is not None:
            self._modules = (*self._modules, weakref.ref(module))

    def _tables(self) -> Tables:
        modules = (ref() for ref in self._modules)
        return Tables([module for module in modules if module is not None])


class Adafactor(Float16OptimizerWithFloat16Params):
    """``torch.optim.Adafactor`` (Shazeer & Stern 2018) on FP32 main params.

    Main params are on the accelerator or in host memory. The settings of this package's own
    optimizers (``state``, ``main_params``, ``backend`` and so on) do not apply. A rank that holds a
    shard of a parameter keeps the row and column means of that shard.

    Args:
        params: parameters, named parameters or param groups; bf16 and FP32 in any mix.
        lr: upper limit of the relative step size, a number or a tensor.
        beta2_decay: exponent of the weight ``t ** beta2_decay`` that a gradient has in the second
            moment at step ``t``.
        eps: lower limits of the second moment's square root (None: FP32's machine epsilon) and of a
            parameter's root mean square.
        d: upper limit of the update direction's root mean square.
        weight_decay: factor of the decoupled weight decay.
        foreach: True for torch's multi-tensor implementation; None lets torch choose.
        maximize: True to maximize the loss.
        offload: share of the parameters' elements that the host stores and steps, 0.0 to 1.0.
        offload_mode: ``"sync"``: the host begins in ``step()``. ``"overlap"``: gradients are copied
            to the host during backward.
        max_grad_norm: limit of the global gradient norm; None does not clip.

    Raises:
        TypeError: a parameter's dtype is not supported.
        ValueError: a setting is out of range or not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        offload: float = 0.0,
        offload_mode: str = "sync",
        max_grad_norm: float | None = None,
    ) -> None:
        cls = torch.optim.Adafactor
        settings: dict[str, Any] = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d}
        settings |= {"weight_decay": weight_decay, "foreach": foreach, "maximize": maximize}
        how: dict[str, Any] = {"param_update_in_fp32": True, "offload_mode": offload_mode}
        inner = HybridDeviceOptimizer(params, offload, cls, cls, **how, **settings)
        super().__init__(inner, OptimizerConfig(lr=0.0, bf16=True, clip_grad=max_grad_norm or 0.0))
