"""A sum over the bits of a tensor shows whether the tensor was written."""

import pytest
import torch

from mp_optim.host.leases import sums_of_bits


@pytest.mark.parametrize("size", [1, 7, 8, 2047, 2048, 2055, 4096, 5003])
def test_device_checksum_changes_when_a_bit_flips_or_bytes_move(size):
    values = torch.randint(0, 256, (size,), dtype=torch.uint8)
    sums = sums_of_bits(values)
    assert sums.equal(sums_of_bits(values.clone()))
    for place in {0, size // 2, size - 1}:
        other = values.clone()
        other[place] ^= 1 << place % 8
        assert not sums.equal(sums_of_bits(other))
    swapped = values.roll(1)
    assert size == 1 or not sums.equal(sums_of_bits(swapped))
