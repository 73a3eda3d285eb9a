"""Where an optimizer's accelerator tensors wait while something else needs the accelerator."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mp_optim.process.leases import before_writing
from mp_optim.process.torch_modes import in_own_modes


class HostSwap:
    """Tensors that were moved to the host, and where they came from. They stay the same objects."""

    def __init__(self) -> None:
        self._parked: list[tuple[Tensor, torch.device]] = []

    @property
    def occupied(self) -> bool:
        """Whether something is parked here."""
        return bool(self._parked)

    @in_own_modes
    def park(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors to the host."""
        for tensor in tensors:
            before_writing([tensor])  # a save would keep its memory
            self._parked.append((tensor, tensor.device))
            tensor.data = tensor.data.cpu()

    @in_own_modes
    def restore(self) -> None:
        """Move them back."""
        for tensor, device in self._parked:
            tensor.data = tensor.data.to(device)
        self._parked.clear()
