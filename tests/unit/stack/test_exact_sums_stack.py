"""Adafactor and StableAdamW in the stack: however parameters are split and placed, the bits of one
process, and checkpoints that each layout reads of the other."""

import pytest

from support.by_day import asked_for
from support.launch import results_of_ranks
from support.models import same_bits
from support.workers import exact_sums as worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exact_sums")


@pytest.fixture(scope="module")
def expected(folder):
    """One process, which also leaves its checkpoints after three of five steps."""
    kinds = {(rule, precision) for rule, precision, _ in worker.KINDS}
    return {kind: worker.single(*kind, str(folder)) for kind in kinds}


@pytest.fixture(scope="module")
def ranks(request, folder, expected):
    """What the four ranks of workers/exact_sums.py found."""
    return results_of_ranks("exact_sums", 4, folder, *asked_for(request))


each_case = pytest.mark.parametrize(
    ("layout", "rule", "precision", "fraction"),
    [
        pytest.param(
            layout, *kind, marks=[] if worker.is_by_day(layout, kind) else pytest.mark.slow
        )
        for layout in worker.LAYOUTS
        for kind in worker.KINDS
    ],
)


def differing(found, expected):
    return [name for name, value in expected.items() if not same_bits(found[name], value)]


@each_case
def test_every_layout_has_the_bits_of_one_process(
    ranks, expected, layout, rule, precision, fraction
):
    for rank in ranks:
        found = rank[f"{layout}, {rule}, {precision}, {fraction}"]
        assert differing(found["trained"], expected[rule, precision]) == []
        assert differing(found["loaded"], expected[rule, precision]) == []


@each_case
def test_one_process_goes_on_from_every_layouts_checkpoint(
    ranks, folder, expected, layout, rule, precision, fraction
):
    where = f"{folder}/{layout}-{rule}-{precision}-{fraction:g}"
    found = worker.single(rule, precision, fraction=1.0 - fraction, load=where)
    assert differing(found, expected[rule, precision]) == []
