"""The number of host threads is checked when it is set."""

import numpy as np
import pytest
import torch

from mp_optim import FusedAdam
from mp_optim.kernels.native_library import set_host_threads, set_thread_share

NO_NUMBERS = [2.0, 0, -1, True, "2", 2**31, 10**400, float("nan"), torch.tensor(2.5), [2]]


def steps() -> bool:
    """True if an optimizer of this process still steps."""
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    FusedAdam([param]).step()
    return bool((param < 1.0).all())


@pytest.mark.parametrize(
    "threads", range(len(NO_NUMBERS)), ids=lambda index: str(NO_NUMBERS[index])[:12]
)
def test_set_host_threads_refuses_invalid_numbers(threads):
    for set_threads in (set_host_threads, set_thread_share):
        with pytest.raises(ValueError, match=r"host_threads=.*whole number from 1 to"):
            set_threads(NO_NUMBERS[threads])
    assert steps()


@pytest.mark.parametrize("threads", [1, np.int64(2), torch.tensor(2)], ids=repr)
def test_set_host_threads_accepts_numpy_and_tensor_integers(threads):
    try:
        set_host_threads(threads)
        assert steps()
    finally:
        set_host_threads(None)
