"""The plan that assigns elements to ranks."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mp_optim.process_groups.agreement import difference
from mp_optim.zero.buckets import SHARD_ALIGNMENT, plan_flat, plan_whole

SIZES = st.lists(st.integers(0, 5000), max_size=12)


def fullest(plan):
    return max(last - first for first, last in itertools.pairwise(plan.bounds))


def payload(plan):
    return sum(item.numel for item in plan.placed)


def check(plans, sizes, ranks):
    owned = {index: [] for index in range(len(sizes))}
    for plan in plans:
        assert type(fullest(plan)) is int and fullest(plan) % SHARD_ALIGNMENT == 0
        last = 0
        for item in plan.placed:
            assert type(item.start) is int and item.start % SHARD_ALIGNMENT == 0
            assert item.start >= last and item.numel == sizes[item.param]
            last = item.start + item.numel
            for rank in range(ranks):
                start, stop = plan.fragment(item, rank)
                assert 0 <= start <= stop <= item.numel and start % SHARD_ALIGNMENT == 0
                owned[item.param].append((start, stop))
        assert last <= plan.numel
    for index, fragments in owned.items():
        covered = 0
        for start, stop in sorted(part for part in fragments if part[0] < part[1]):
            assert start == covered
            covered = stop
        assert covered == sizes[index]


@given(SIZES, st.integers(1, 7), st.one_of(st.none(), st.integers(1, 9000)))
def test_flat_shards_assign_every_element_to_one_rank(sizes, ranks, bucket_size):
    plans = plan_flat(sizes, ranks, bucket_size)
    check(plans, sizes, ranks)
    for plan in plans:
        padding = plan.numel - payload(plan)
        assert padding < SHARD_ALIGNMENT * (len(plan.placed) + ranks)
        if bucket_size is not None and plan is not plans[-1]:
            assert payload(plan) + SHARD_ALIGNMENT * len(plan.placed) >= bucket_size


@given(SIZES, st.integers(1, 7))
def test_whole_shards_assign_every_param_to_one_rank_and_balance_bytes(sizes, ranks):
    plans = plan_whole(sizes, ranks)
    check(plans, sizes, ranks)
    if plans:
        (plan,) = plans
        for item in plan.placed:
            assert (0, item.numel) in [plan.fragment(item, rank) for rank in range(ranks)]
        filled = sum(-(-size // SHARD_ALIGNMENT) * SHARD_ALIGNMENT for size in sizes)
        assert plan.numel == filled  # Shards of different sizes are not padded to the largest.
        assert fullest(plan) <= filled / ranks + (1 - 1 / ranks) * max(
            -(-s // SHARD_ALIGNMENT) * SHARD_ALIGNMENT for s in sizes
        )


def test_flat_shards_have_exact_sizes_beyond_2_to_the_53_elements():
    """DeepSpeed divides with ``/``; a float size is not exact beyond 2**53 elements."""
    huge = 2**53 + 1
    (plan,) = plan_flat([huge], 3)
    assert [
        plan.fragment(plan.placed[0], rank)[1] - plan.fragment(plan.placed[0], rank)[0]
        for rank in range(3)
    ] == [fullest(plan), fullest(plan), huge - 2 * fullest(plan)]


def test_agreement_difference_names_the_ranks_and_lines_that_differ():
    assert difference([["a", "b"], ["a", "b"]], [4, 5]) is None
    message = difference([["a", "x"], ["a", "b"], ["a", "b"], ["a"]], [4, 5, 6, 7])
    assert (
        message == "rank 4 has 'x' where rank 5 has 'b'; rank 7 has 'nothing' where rank 5 has 'b'"
    )
