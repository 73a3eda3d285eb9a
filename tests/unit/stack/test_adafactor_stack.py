"""Adafactor in the stack: however parameters are split and placed, the bits of one process, and
checkpoints that each layout reads of the other."""

import pytest

from support.launch import results_of_ranks
from support.models import same_bits
from support.workers import adafactor as worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adafactor")


@pytest.fixture(scope="module")
def expected(folder):
    """One process, which also leaves its checkpoints after three of five steps."""
    return {
        precision: worker.single(precision, str(folder))
        for precision in worker.PRECISIONS
    }


@pytest.fixture(scope="module")
def ranks(folder, expected):
    """What the four ranks of workers/adafactor.py found."""
    return results_of_ranks("adafactor", 4, folder)


def differing(found, expected):
    return [
        name for name, value in expected.items() if not same_bits(found[name], value)
    ]


@pytest.mark.parametrize(("precision", "fraction"), worker.KINDS)
@pytest.mark.parametrize("layout", worker.LAYOUTS)
def test_every_layout_has_the_bits_of_one_process(
    ranks, expected, layout, precision, fraction
):
    for rank in ranks:
        found = rank[f"{layout}, {precision}, {fraction}"]
        assert differing(found["trained"], expected[precision]) == []
        assert differing(found["loaded"], expected[precision]) == []


@pytest.mark.parametrize(("precision", "fraction"), worker.KINDS)
@pytest.mark.parametrize("layout", worker.LAYOUTS)
def test_one_process_goes_on_from_every_layouts_checkpoint(
    ranks, folder, expected, layout, precision, fraction
):
    where = f"{folder}/{layout}-{precision}-{fraction:g}"
    found = worker.single(precision, fraction=1.0 - fraction, load=where)
    assert differing(found, expected[precision]) == []
