"""The save plan of many ranks: every element is written once, and planning takes seconds."""

import math
import pickle
import time
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_optim.checkpoint.writing import Held, shares, sheets_of
from mp_optim.core.partition import Box, boxes, whole_box

STATE = ("master_param", "exp_avg", "exp_avg_sq")


def zero_1(ranks, shapes):
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
    return [(*whole, *mine, *held) for mine, held in zip(steps, parts, strict=True)]


def split(held):
    return [entry for entry in held if entry.places]


def planned(held_of_ranks):
    sheets = [sheets_of(held) for held in held_of_ranks]
    told = {digest: sheet for own in sheets for digest, sheet in own.items()}
    return told, shares(sheets, [split(held) for held in held_of_ranks])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Held("w", torch.bfloat16, (4, 2)), r"is torch.float32 \(4, 2\), whole on rank 0, but"),
        (Held("w", torch.float32, (2, 4)), r"but torch.float32 \(2, 4\), whole on rank 1, and"),
        (
            Held("w", torch.float32, (4, 2), boxes((4, 2), 0, 8)),
            r"but torch.float32 \(4, 2\), sharded on rank 1, .*; give different tensors",
        ),
    ],
)
def test_save_plan_refuses_two_different_tensors_with_one_name(other, said):
    own = Held("w", torch.float32, (4, 2))
    with pytest.raises(ValueError, match=said):
        planned([(own,), (other,)])


def written(plan):
    found = {}
    for rank, share in enumerate(plan):
        for name, places in share.items():
            found.setdefault(name, []).extend((place, rank) for place in places)
    return found


def test_save_plan_of_64_ranks_and_2000_parameters_takes_under_2_seconds():
    shapes = {f"layers.{index}.mlp.weight": (16, 16 + index % 3) for index in range(2_000)}
    few, many = zero_1(8, shapes), zero_1(64, shapes)
    begun = time.process_time()
    told, plan = planned(many)
    seconds = time.process_time() - begun
    found = written(plan)
    entry_of = {entry.name: entry for held in many for entry in held}
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
    assert seconds < 2
    size = len(pickle.dumps((told, [*map(split, many)])))
    assert size < 1.2 * len(pickle.dumps((planned(few)[0], [*map(split, few)])))


@st.composite
def layouts_of(draw):
    ranks = draw(st.integers(1, 6))
    held = [[] for _ in range(ranks)]
    some_ranks = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True)
    for number in range(draw(st.integers(1, 8))):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        if not shape or draw(st.booleans()):
            for rank in draw(some_ranks):
                held[rank].append(Held(f"e{number}", torch.float32, shape))
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        cuts = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim])))})
        for begin, end in pairwise(cuts):
            place = Box(
                tuple(begin if at == dim else 0 for at in range(len(shape))),
                tuple(end - begin if at == dim else size for at, size in enumerate(shape)),
            )
            for rank in draw(some_ranks):
                held[rank].append(Held(f"e{number}", torch.float32, shape, (place,)))
    return held


@given(layouts_of())
@settings(max_examples=200, deadline=None)
def test_save_plan_writes_every_element_once(held_of_ranks):
    _, plan = planned(held_of_ranks)
    entry_of = {entry.name: entry for held in held_of_ranks for entry in held}
    found = written(plan)
    assert found.keys() == entry_of.keys()
    for name, places in found.items():
        covered = torch.zeros(entry_of[name].shape, dtype=torch.int64)
        for place, _ in places:
            covered[tuple(slice(at, at + size) for at, size in zip(*place, strict=True))] += 1
        assert bool((covered == 1).all()), name


@given(layouts_of(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_save_plan_refuses_missing_and_overlapping_parts(held_of_ranks, chance):
    parts = [part for held in held_of_ranks for part in split(held)]
    if not parts:
        return
    part = chance.choice(parts)
    (place,) = part.places
    if place.sizes == part.shape:
        return
    overlaps = chance.random() < 0.5
    larger = part._replace(places=(whole_box(part.shape),))
    broken = [
        [
            larger if overlaps and entry == part else entry
            for entry in held
            if overlaps or entry != part
        ]
        for held in held_of_ranks
    ]
    if any(entry.name == part.name for held in broken for entry in held):
        with pytest.raises(ValueError, match=part.name):
            planned(broken)
