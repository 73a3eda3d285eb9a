"""Plans of many ranks, made without any: what each writes, what they tell each other, and how long
it takes. And what many tensors cost one process."""

import math
import pickle
import random
import time
from itertools import accumulate, chain, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_optim.checkpoint.file_format import Index, Saved, SavedBox, as_json, as_metadata, from_json
from mp_optim.checkpoint.replicas import to_compare
from mp_optim.checkpoint.writing import Held, Holding, shares
from mp_optim.core.partition import Box, boxes, whole_box

STATE = ("master_param", "exp_avg", "exp_avg_sq")


def zero_1(ranks, shapes):
    """What ranks of ZeRO-1 hold: the model whole, and flat ranges of equal length of the state,
    with its steps."""
    whole = tuple(Held(f"model.{name}", torch.bfloat16, shape) for name, shape in shapes.items())
    ends = list(accumulate(math.prod(shape) for shape in shapes.values()))
    cuts = [rank * ends[-1] // ranks for rank in range(ranks + 1)]
    steps, parts = [[] for _ in range(ranks)], [[] for _ in range(ranks)]
    for (name, shape), end in zip(shapes.items(), ends, strict=True):
        start = end - math.prod(shape)
        rank = (
            max(0, next(at for at, cut in enumerate(cuts) if cut > start) - 1)
            if ranks < 100
            else min(ranks - 1, start * ranks // ends[-1])
        )
        while rank < ranks and cuts[rank] < end:
            first, last = max(start, cuts[rank]), min(end, cuts[rank + 1])
            if first < last:
                places = boxes(shape, first - start, last - first)
                parts[rank] += [
                    Held(f"optimizer.state.{key}.{name}", torch.float32, shape, places)
                    for key in STATE
                ]
                steps[rank].append(Held(f"optimizer.state.step.{name}", torch.float32, ()))
            rank += 1
    return [Holding((*whole, *mine), tuple(held)) for mine, held in zip(steps, parts, strict=True)]


def planned(holdings):
    sheets = [holding.sheets for holding in holdings]
    told = {digest: sheet for own in sheets for digest, sheet in own.items()}
    return told, shares(
        told, [list(own) for own in sheets], [holding.shards for holding in holdings]
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Held("w", torch.bfloat16, (4, 2)), r"is torch.float32 \(4, 2\), whole on rank 0 and"),
        (Held("w", torch.float32, (2, 4)), r"and torch.float32 \(2, 4\), whole on rank 1;"),
        (
            Held("w", torch.float32, (4, 2), boxes((4, 2), 0, 8)),
            r"and torch.float32 \(4, 2\), sharded on rank 1; different things need different names",
        ),
    ],
)
def test_one_name_for_two_things_is_refused(other, said):
    own = Held("w", torch.float32, (4, 2))
    with pytest.raises(ValueError, match=said):
        planned(
            [
                Holding(*(((held,), ()) if held.places is None else ((), (held,))))
                for held in (own, other)
            ]
        )


def written(holdings, plan):
    """Every box that is written, by name, with the rank."""
    found = {}
    for rank, (holding, share) in enumerate(zip(holdings, plan, strict=True)):
        for entry in holding.whole:
            if entry.name in share.whole:
                found.setdefault(entry.name, []).append((whole_box(entry.shape), rank))
        for part in holding.shards:
            for place in part.places:
                if place not in share.left_out.get(part.name, ()):
                    found.setdefault(part.name, []).append((place, rank))
    return found


def test_64_ranks_of_10000_parameters_are_planned_in_seconds():
    """Each element once; nobody writes much more than others; and what is told does not grow with
    the ranks."""
    shapes = {f"layers.{index}.mlp.weight": (16, 16 + index % 3) for index in range(10_000)}
    few, many = zero_1(8, shapes), zero_1(64, shapes)
    begun = time.process_time()
    told, plan = planned(many)
    seconds = time.process_time() - begun
    found = written(many, plan)
    entries = chain.from_iterable((*holding.whole, *holding.shards) for holding in many)
    entry_of = {entry.name: entry for entry in entries}
    assert found.keys() == entry_of.keys()
    for name, places in found.items():
        assert sum(math.prod(place.sizes) for place, _ in places) == math.prod(
            entry_of[name].shape
        ), name
    loads = [0] * 64
    for name, places in found.items():
        for place, rank in places:
            loads[rank] += math.prod(place.sizes) * entry_of[name].dtype.itemsize
    assert max(loads) < 1.1 * sum(loads) / 64
    assert seconds < 10
    size = len(pickle.dumps((told, [holding.shards for holding in many])))
    assert size < 1.2 * len(pickle.dumps((planned(few)[0], [holding.shards for holding in few])))


@st.composite
def layouts_of(draw):
    """Some entries on some ranks: whole on several, or cut anyhow along one dimension, each part on
    several."""
    ranks = draw(st.integers(1, 6))
    whole, parts = [[] for _ in range(ranks)], [[] for _ in range(ranks)]
    some_ranks = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True)
    for number in range(draw(st.integers(1, 8))):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        if not shape or draw(st.booleans()):
            for rank in draw(some_ranks):
                whole[rank].append(Held(f"e{number}", torch.float32, shape))
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        cuts = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim])))})
        for begin, end in pairwise(cuts):
            place = Box(
                tuple(begin if at == dim else 0 for at in range(len(shape))),
                tuple(end - begin if at == dim else size for at, size in enumerate(shape)),
            )
            for rank in draw(some_ranks):
                parts[rank].append(Held(f"e{number}", torch.float32, shape, (place,)))
    return [Holding(tuple(mine), tuple(held)) for mine, held in zip(whole, parts, strict=True)]


@given(layouts_of())
@settings(max_examples=200, deadline=None)
def test_every_element_is_written_once(holdings):
    _, plan = planned(holdings)
    entry_of = {
        entry.name: entry for holding in holdings for entry in (*holding.whole, *holding.shards)
    }
    found = written(holdings, plan)
    assert found.keys() == entry_of.keys()
    for name, places in found.items():
        covered = torch.zeros(entry_of[name].shape, dtype=torch.int64)
        for place, _ in places:
            covered[tuple(slice(at, at + size) for at, size in zip(*place, strict=True))] += 1
        assert bool((covered == 1).all()), name


@given(layouts_of(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_parts_that_are_missing_or_overlap_are_refused(holdings, chance):
    rank = chance.randrange(len(holdings))
    if not holdings[rank].shards:
        return
    at = chance.randrange(len(holdings[rank].shards))
    parts = list(holdings[rank].shards)
    part = parts[at]
    (place,) = part.places
    if place.sizes == part.shape:
        return
    if chance.random() < 0.5:
        parts[at] = part._replace(places=(whole_box(part.shape),))
    else:  # gone, wherever it was held
        gone = part.places
        holdings = [
            Holding(
                held.whole, tuple(p for p in held.shards if (p.name, p.places) != (part.name, gone))
            )
            for held in holdings
        ]
        parts = list(holdings[rank].shards)
    broken = [*holdings[:rank], Holding(holdings[rank].whole, tuple(parts)), *holdings[rank + 1 :]]
    if any(p.name == part.name for held in broken for p in held.shards):
        with pytest.raises(ValueError, match=part.name):
            planned(broken)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=2, max_size=8))
def test_parameters_are_compared_one_by_one_only_where_they_may_differ(ranks):
    """Ranks that hold one of four sets of names, with one of two values."""
    names = {0: ("a", "b"), 1: ("b", "c"), 2: ("d",), 3: ()}
    reports = [(bytes([kind]), bytes([value])) for kind, value in ranks]
    compared = to_compare(reports, {bytes([kind]): names[kind] for kind, _ in ranks})
    for name in "abcd":
        holders = {(kind, value) for kind, value in ranks if name in names[kind]}
        assert (len(holders) > 1) == (name in compared)


def test_what_is_where_for_many_ranks_is_made_and_read_in_seconds():
    """60,000 boxes, as 1,024 ranks of ZeRO-1 with 10,000 parameters write."""
    chance = random.Random(0)
    entries = {
        f"optimizer.state.{key}.layers.{index}.weight": Saved(
            torch.float32,
            (16, 16),
            [
                SavedBox(
                    Box((0, 0), (16, 16)),
                    f"__{chance.randrange(1024)}_0.distcp",
                    1024 * index,
                    1024,
                )
            ],
        )
        for index in range(10_000)
        for key in ("step", "master_param", "exp_avg", "exp_avg_sq", "x", "y")
    }
    sizes = {f"__{rank}_0.distcp": 1 << 25 for rank in range(1024)}
    index = Index(entries, {name: [0] * 32 for name in sizes})
    begun = time.process_time()
    content = as_json(index)
    assert from_json(content, sizes) == index
    metadata = as_metadata(index, Path("x"))
    assert time.process_time() - begun < 10
    assert len(content) / len(entries) < 120 and len(metadata) / len(entries) < 250
