"""How far two results are apart, in the units that a proof goes by."""

import math

import pytest
import torch

from support.differences import MOST_LR, MOST_RELATIVE, MOST_ULPS, Deviation


def test_parameters_are_compared_in_units_of_the_largest_and_of_the_rate():
    theirs = torch.tensor([1.5, 0.25, -3.0])  # the largest is in [2, 4): its last place is 2**-22
    ours = theirs + torch.tensor([0.0, 3 * 2.0**-22, 0.0])
    found = Deviation()
    found.params(ours, theirs, 2.0**-10)
    assert (found.ulps, found.lrs, found.same) == (3.0, 3 * 2.0**-12, False)
    assert found.excess == pytest.approx(3 * 2.0**-22 / (MOST_ULPS * 2.0**-22 + MOST_LR * 2.0**-10))
    found.params(theirs, theirs, 2.0**-10)  # what was worse stays
    assert (found.ulps, found.same) == (3.0, False)


def test_of_small_parameters_the_rate_is_the_measure():
    found = Deviation()
    found.params(torch.tensor([2.0**-30]), torch.zeros(1), 2.0**-10)
    assert (found.ulps, found.lrs) == (2.0**-30 / 2.0**-33, 2.0**-20)


def test_everything_else_is_relative_to_its_largest():
    found = Deviation()
    found.others(torch.tensor([8.0, 1.5]), torch.tensor([8.0, 1.0]))
    assert (found.relative, found.same, found.ulps) == (0.0625, False, 0.0)
    assert found.excess == pytest.approx(0.0625 / MOST_RELATIVE)
    found = Deviation()
    found.others(torch.tensor([8.5]), torch.tensor([8.0]), allowed=0.0625)
    assert found.excess == 1.0 and found.tolerable
    found.others(torch.tensor([8.5]), torch.tensor([8.0]), allowed=0.0624)
    assert not found.tolerable


def test_equal_bits_are_no_difference_and_a_zeros_sign_is_one():
    found = Deviation()
    for values in (
        torch.tensor([1.0, 0.0]),
        torch.tensor([], dtype=torch.float32),
        torch.ones(2).bfloat16(),
    ):
        found.params(values, values.clone(), 0.1)
        found.others(values, values.clone())
    assert found == Deviation() and found.tolerable
    found.params(torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.0]), 0.1)
    assert not found.same and found.tolerable
    assert not _same_dtype()


def _same_dtype():
    found = Deviation()
    found.others(torch.ones(1).bfloat16(), torch.ones(1).half())
    return found.same


@pytest.mark.parametrize(
    "compare", [lambda f, a, b: f.params(a, b, 0.1), lambda f, a, b: f.others(a, b)]
)
def test_a_nan_is_as_far_as_can_be(compare):
    found = Deviation()
    compare(found, torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0]))
    assert found.excess == math.inf and not found.tolerable
