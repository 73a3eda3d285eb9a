"""What Megatron's ``HybridDeviceOptimizer`` asks of CUDA, on a CPU: it tries the program."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import MagicMock

import torch
from torch import Tensor


class _HostTensor(Tensor):
    """A tensor that counts as one in host memory; all others count as CUDA tensors."""


def replace_cuda() -> None:
    """Replace streams, ``pin_memory`` and ``is_cuda`` until this process ends."""
    torch.cuda.Stream = torch.cuda.current_stream = MagicMock()  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment, misc]
    Tensor.pin_memory = lambda tensor: tensor.as_subclass(_HostTensor)  # type: ignore[assignment]
    Tensor.is_cuda = property(lambda tensor: not isinstance(tensor, _HostTensor))  # type: ignore[assignment, misc]
