"""Offload plans, bucket sizes, worker threads and the description."""

import pytest
import torch
from torch import nn

from mp_optim import get_megatron_optimizer
from mp_optim.core import Slot
from mp_optim.host.host_share import HostShare
from mp_optim.offload import backward_scheduler as cores
from mp_optim.offload.backward_scheduler import worker_threads
from mp_optim.offload.buckets import PER_ROUND, SMALLEST, HostSlot, plan_offload, plan_staging
from support.models import config_for


@pytest.mark.parametrize(
    ("sizes", "fraction", "chosen"),
    [
        ([5, 3, 2], 0.5, {2, 1}),  # Parameters are chosen from the last to the first.
        ([2, 10, 3], 0.3, {2, 0}),  # 10 would exceed the fraction and is skipped.
        ([7, 4], 0.5, {0}),  # The smallest remaining size covers the rest and makes 4 unnecessary.
        ([9, 8, 7], 0.01, {2}),  # Every size exceeds the fraction, so the smallest is chosen.
        ([1, 0, 6, 0], 1.0, {0, 2}),  # Empty parameters stay on the device.
        ([10, 1], 0.9, {0}),  # The last was chosen first and is dropped again.
        ([6, 6, 1, 1], 0.5, {3, 1}),  # Of equal sizes that are not needed the first is dropped.
    ],
)
def test_step_plan_splits_slots_by_place(sizes, fraction, chosen):
    assert plan_offload(sizes, fraction) == chosen


@pytest.mark.parametrize("fraction", [-0.001, 1.001, float("nan")])
def test_offload_plan_refuses_fractions_outside_0_to_1(fraction):
    with pytest.raises(ValueError, match="offload_fraction"):
        plan_offload([1], fraction)


def slots_in_buckets(mode, sizes, most):
    """Return the number of slots in each bucket, for slots of these staging bytes."""
    slots = []
    for position, size in enumerate(sizes):
        slots.append(HostSlot(Slot(0, position), size // 2, size // 2, torch.int8))
    return [len(bucket) for bucket in plan_staging(mode, slots, most, pipelined=False)[0]]


def test_buckets_are_filled_to_the_byte_limit_and_never_beyond():
    assert slots_in_buckets("sync", [6, 6, 6, 6], 12) == [2, 2]
    assert slots_in_buckets("sync", [6, 6, 6, 6], 10) == [1, 1, 1, 1]
    assert slots_in_buckets("sync", [18, 0, 2], 12) == [1, 2]
    assert slots_in_buckets("sync", [2, 12, 10, 2], 12) == [1, 1, 2]


@pytest.mark.parametrize(
    ("count", "size", "most", "buckets"),
    [
        (10, 2, 64 << 20, [10]),
        (4 * PER_ROUND, SMALLEST // 4, 64 << 20, [4] * PER_ROUND),
        (PER_ROUND, SMALLEST + 2, 64 << 20, [1] * PER_ROUND),
        (4 * PER_ROUND, SMALLEST, 64 << 20, [4] * PER_ROUND),
        (4 * PER_ROUND, 32 << 20, 64 << 20, [2] * 2 * PER_ROUND),
        (10, 2, 7, [3, 3, 3, 1]),
        (0, 0, 0, []),
    ],
)
def test_bucket_size_is_a_sixteenth_of_the_model_between_smallest_and_largest_size(
    count, size, most, buckets
):
    assert slots_in_buckets("overlap", [size] * count, most) == buckets


@pytest.mark.parametrize(
    ("threads", "share"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 6), (9, 6), (16, 12), (64, 48)]
)
def test_worker_leaves_the_larger_of_two_threads_and_a_quarter_to_backward(
    threads, share, monkeypatch
):
    whole = HostShare(threads, "made up")
    monkeypatch.setattr(cores, "host_share", lambda: whole)
    assert worker_threads(None) == share and worker_threads(5) == 5


def test_describe_counts_elements_and_bytes_by_group_place_and_dtype():
    model = nn.ParameterDict(
        {
            "a": nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)),
            "b": nn.Parameter(torch.ones(500)),
            "c": nn.Parameter(torch.ones(3)),
            "frozen": nn.Parameter(torch.ones(7, dtype=torch.bfloat16), requires_grad=False),
        }
    )
    groups = [
        {"params": [model["a"], model["frozen"], model["b"]], "param_names": ["a", "frozen", "b"]},
        {"params": [model["c"]], "param_names": ["c"], "lr": 0.5},
    ]
    optimizer = get_megatron_optimizer(
        config_for("bf16", fused_backend="reference"), model, param_groups=groups
    )
    description = optimizer.describe()
    adam, step = 8, 4
    found = [
        (row.group, row.place, row.model_dtype, row.slots, row.params, row.bytes, row.backend)
        for row in description.rows
    ]
    assert sorted(found) == [
        (0, "device", "bfloat16", 2, 1007, 1000 * (4 + adam) + step, "reference"),
        (0, "device", "float32", 1, 500, 500 * adam + step, "reference"),
        (1, "device", "float32", 1, 3, 3 * adam + step, "reference"),
    ]
    lines = str(description).splitlines()
    assert lines[0].split() == [
        "group",
        "place",
        "model_dtype",
        "slots",
        "params",
        "bytes",
        "backend",
    ]
    assert lines[1].split() == ["0", "device", "bfloat16", "2", "1,007", "12,004", "reference"]
    assert (
        len({line.index("reference") for line in lines[1:4]} | {lines[0].index("backend")}) == 1
    )  # The backends are aligned in one column.
    assert lines[4].startswith("device: reference (") and len(lines) == 5
