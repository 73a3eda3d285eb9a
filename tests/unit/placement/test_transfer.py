"""What the CUDA transfer asks of torch, on a simulated accelerator."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

from mp_optim import FusedAdam, HybridDeviceOptimizer
from mp_optim.placement.transfer import CudaTransfer
from support.accelerator.stand_in import simulated_accelerator
from support.offload import MODES

DEVICE = 1
CUDA = torch.device("cuda", DEVICE)


@pytest.mark.native
@pytest.mark.parametrize("mode", MODES)
def test_a_bucket_is_one_copy_in_each_direction(mode: str) -> None:
    """Whatever its parameters; no tensor of them is told to the allocator by itself."""
    with simulated_accelerator() as simulation:
        params = [nn.Parameter(torch.ones(16)) for _ in range(12)]
        optimizer = HybridDeviceOptimizer(
            params, 1.0, FusedAdam, FusedAdam, lr=0.5, offload_mode=mode
        )
        optimizer.stepper.use_transfer(CudaTransfer(CUDA), 4 * 2 * 64)
        for param in params:
            simulation.to_device(param, DEVICE)
            param.grad = simulation.to_device(torch.ones(16), DEVICE)
        optimizer.step()  # makes main params and state
        for _ in range(2):
            with mock.patch.object(simulation, "queue", wraps=simulation.queue) as spy:
                optimizer.step()
            deeds = Counter(call.args[2].what for call in spy.call_args_list)
            assert deeds == {"aten._foreach_copy_.default": 2 * 3}
        torch.cuda.synchronize()
        assert not any(region.recorded for region in simulation.memory)
    assert not simulation.reports
