"""Loss scales for FP16 training. Their state is a few scalars on the device, and ``update()`` never
waits for the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.setting_checks import WHOLE, Number, check_setting, whole
from mp_optim.host.calls import in_own_modes
from mp_optim.host.host_memory import as_tensor

_LARGEST = 2.0**126
"""The largest power of two whose reciprocal is a normal FP32 number."""


_SCALER_STATE = {
    "scale": Number(0.0, _LARGEST, open_low=True),
    "growth_tracker": WHOLE,
    "hysteresis_tracker": WHOLE,
}
"""The keys of a dynamic loss scale's state, with the allowed values."""
_GROWTH = Number(1.0, open_low=True)
_BACKOFF = Number(0.0, 1.0, open_low=True, open_high=True)
_STEPS = whole(1, 2**53)


class MegatronGradScaler(ABC):
    """Base class of loss scales: a positive factor of the loss that keeps FP16 gradients in range.

    Args:
        initial_scale: first value of the scale, at most 2**126.
        device: device of the scale.
    """

    @in_own_modes
    def __init__(self, initial_scale: float, device: torch.device | str = "cpu") -> None:
        check_setting("initial_scale", initial_scale, _SCALER_STATE["scale"])
        self._scale = torch.tensor([initial_scale], dtype=torch.float32, device=device)

    @property
    def scale(self) -> Tensor:
        """The factor of the loss: FP32, shape (1,). This is the live tensor, which ``update()``
        overwrites."""
        return self._scale

    def may_shrink(self, scale: float) -> bool:
        """True if the loss scale can still shrink below ``scale``, so an overflow with ``scale`` is
        expected."""
        return False

    @property
    def inv_scale(self) -> Tensor:
        """The factor that unscales gradients: FP64, shape (1,)."""
        return self._scale.double().reciprocal()

    @abstractmethod
    def update(self, found_inf: bool | Tensor) -> None:
        """Adapt the scale after a step.

        Args:
            found_inf: True if a gradient of the step had an inf or nan: a bool, or a tensor of one
                element.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def check_state_dict(self, state_dict: Any) -> None:
        """Raise ValueError if :meth:`load_state_dict` cannot load the state. The loss scale is not
        changed."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class ConstantGradScaler(MegatronGradScaler):
    """A loss scale that never changes."""

    def update(self, found_inf: bool | Tensor) -> None:
        """Do nothing, because the scale is constant."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def check_state_dict(self, state_dict: Any) -> None:
        """Accept any state, because the scale is constant."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class DynamicGradScaler(MegatronGradScaler):
    """A loss scale that shrinks after ``hysteresis`` overflows in a row, and grows after
    ``growth_interval`` clean steps in a row.

    After the hysteresis is used up, every further overflow shrinks the scale, until a clean step
    restores the hysteresis. The scale is at most 2**126 and at least ``min_scale``.

    Args:
        initial_scale: first value of the scale.
        min_scale: smallest value of the scale.
        growth_factor: factor by which the scale grows, > 1.
        backoff_factor: factor by which the scale shrinks, in (0, 1).
        growth_interval: number of clean steps in a row before the scale grows, >= 1.
        hysteresis: number of overflows in a row before the scale shrinks, >= 1.
        device: device of the state. On the model's device, ``update()`` does not wait.

    Raises:
        ValueError: an argument is out of range; the message has its name.
    """

    @in_own_modes
    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(initial_scale, device)
        floor = Number(0.0, initial_scale, open_low=True)
        check_setting("min_scale", min_scale, floor)
        check_setting("growth_factor", growth_factor, _GROWTH)
        check_setting("backoff_factor", backoff_factor, _BACKOFF)
        check_setting("growth_interval", growth_interval, _STEPS)
        check_setting("hysteresis", hysteresis, _STEPS)
        self.min_scale = min_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = int(growth_interval)
        self.hysteresis = int(hysteresis)
        self._growth_tracker = torch.zeros(1, dtype=torch.int32, device=device)
        self._hysteresis_tracker = torch.full(
            (1,), self.hysteresis, dtype=torch.int32, device=device
        )

    def may_shrink(self, scale: float) -> bool:
        return scale > self.min_scale

    def update(self, found_inf: bool | Tensor) -> None:
        inf = torch.as_tensor(found_inf, device=self._scale.device).bool().reshape(1)
        left = torch.where(inf, (self._hysteresis_tracker - 1).clamp(min=0), self.hysteresis)
        clean = torch.where(inf, 0, self._growth_tracker + 1)
        grows = clean >= self.growth_interval
        scale = self._scale.double()
        # Compute with tensors, because torch.where() of two plain numbers has the default dtype.
        changed = torch.where(
            inf & (left == 0),
            scale * self.backoff_factor,
            torch.where(grows, scale * self.growth_factor, scale),
        )
        self._scale.copy_(changed.clamp(self.min_scale, _LARGEST))
        self._hysteresis_tracker.copy_(left)
        self._growth_tracker.copy_(torch.where(grows, 0, clean))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of three device scalars by name: ``scale``, ``growth_tracker`` and
        ``hysteresis_tracker``."""
        return {key: live.clone() for key, live in self._live().items()}

    def _live(self) -> dict[str, Tensor]:
        trackers = self._growth_tracker, self._hysteresis_tracker
        return dict(zip(_SCALER_STATE, (self._scale, *trackers), strict=True))

    def check_state_dict(self, state_dict: Any) -> None:
        lacks = ""
        if not isinstance(state_dict, Mapping):
            lacks = f"is {state_dict!r}"
        elif missing := sorted(_SCALER_STATE.keys() - state_dict.keys()):
            lacks = f"lacks {missing}"
        if lacks:
            raise ValueError(
                f"grad_scaler: the saved state {lacks}, because it was perhaps saved with a "
                "constant loss scale, or without a loss scale; load with convert=True to "
                "continue with the current loss scale"
            )
        for key, rule in _SCALER_STATE.items():
            check_setting(f"grad_scaler.{key}", state_dict[key], rule)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_state_dict(state_dict)
        for key, live in self._live().items():
            live.copy_(as_tensor(state_dict[key]).reshape(1))
