"""The loss scale of ``torch.amp.GradScaler``, as the stack below reads one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mp_optim.precision.grad_scaler import MegatronGradScaler


class AmpLossScale(MegatronGradScaler):
    """What a ``GradScaler`` says the loss was multiplied with, for one step; it decides itself what
    comes after.

    Args:
        scale: one element, FP32, on any device.
    """

    def __init__(self, scale: Tensor) -> None:
        super().__init__(
            1.0
        )  # on the host: a number's way to a device would be waited for
        self._scale = scale.detach().reshape(1)

    @property
    def was_asked(self) -> bool:
        return True

    def may_shrink(self, scale: float) -> bool:
        return True

    def scale_after(
        self, scale: float, trackers: Sequence[float], found_inf: bool
    ) -> float | None:
        return None

    def update(self, found_inf: bool | Tensor) -> None:
        """The ``GradScaler`` has its own ``update``."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def check_state_dict(self, state_dict: Any) -> None:
        """Anything will do: nothing is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
