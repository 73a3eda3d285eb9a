"""Objects of verl's ``delta_sharded``, read by receivers that follow its sources: verl 1dda039b,
docs/advance/delta_weight_sync.md, delta_checkpoint_engine.py and delta_sync/ of
verl/checkpoint_engine, verl/workers/rollout/sglang_rollout/delta_loader.py; and verl 5a27d062,
verl/workers/rollout/vllm_rollout/delta_weight_transfer.py."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mp_optim.apps.deltas import verl_entries, verl_flushes
from support.deltas import PublishedRun, assert_equal_bits

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "hash_tensor"), reason="verl's checksum needs torch.hash_tensor"
)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def checksum(positions: Tensor, values: Tensor) -> int:
    """Return the XOR of the 64-bit integers of all positions, and of all values as FP64."""
    as_bits = positions.numpy().astype(np.uint64), values.double().numpy().view(np.uint64)
    one, other = [int(np.bitwise_xor.reduce(bits)) for bits in as_bits]
    return one ^ (other << 1)


def apply_flush(weights: dict[str, Tensor], named: list[tuple[str, Tensor]]) -> str:
    """Write a flush to weights, and return its encoding.

    A sparse flush becomes one tensor for each entry, with NaN for unchanged elements.
    """
    found = dict(named)
    spec = json.loads(bytes(found["__delta_spec__"].tolist()))
    values, is_dense = found["__values__"], spec["encoding"] == "dense"
    positions = found.get("__positions__", torch.empty(0, dtype=torch.uint8))
    assert [*found] == ["__delta_spec__", *["__positions__"] * (not is_dense), "__values__"]
    assert spec["checksum"] == checksum(positions, values)
    assert values.ndim == 1 and positions.dtype == torch.uint8
    for entry in spec["params"]:
        dtype, name = DTYPES[entry["dtype"]], entry["name"]
        mine = values[entry["val_start"] : entry["val_end"]]
        assert mine.dtype == dtype and entry["shape"] == [*weights[name].shape]
        flat = torch.full((math.prod(entry["shape"]),), float("nan"), dtype=dtype)
        if is_dense:
            flat = mine
        else:
            assert entry["pos_width"] == 4
            content = positions[entry["pos_start"] : entry["pos_end"]].numpy().tobytes()
            where = torch.from_numpy(np.frombuffer(content, "<i4").astype(np.int64))
            assert where.numel() == mine.numel() == where.unique().numel()
            flat[where] = mine
        loaded = flat.view(entry["shape"])
        weights[name] = torch.where(loaded.isnan(), weights[name], loaded)
    return spec["encoding"]


@pytest.mark.parametrize("most_bytes", [64, 1000, 1 << 29])
def test_verl_flushes_update_workers_to_the_published_weights(tmp_path, most_bytes):
    run = PublishedRun(most_bytes, tmp_path)
    worker, late = run.weights(), None
    for number in range(1, 31):
        run.train()
        is_full = number % 12 == 0
        if is_full:
            run.resume()
            late = late or {name: torch.zeros_like(one) for name, one in worker.items()}
        flushes = [*verl_flushes(run.publish(is_full), most_bytes=most_bytes, device="cpu")]
        for at, (named, is_last) in enumerate(flushes):
            assert is_last == (at == len(flushes) - 1)
            encodings = {apply_flush(each, named) for each in (worker, late) if each is not None}
            assert encodings == {"dense" if is_full else "indices"}
            sizes = [tensor.nbytes for name, tensor in named if name != "__delta_spec__"]
            assert is_full or sum(sizes) <= most_bytes
        assert_equal_bits(worker, run.weights())
    assert late is not None and run.skipped > 0
    assert_equal_bits(late, run.weights())


def test_verl_entries_of_all_ranks_have_the_changes_of_a_publication(tmp_path):
    run, group = PublishedRun(0, tmp_path), object()
    rank_0 = run.weights()
    for number in range(1, 31):
        run.train()
        parts = run.publish(number % 10 == 0)
        ranks = [verl_entries(part, run.model, group, "cpu") for part in parts]
        names = []
        for entries in zip(*ranks, strict=True):
            ((name, shape),), dtype, *_, found = entries[0]
            names.append(name)
            assert all(entry[:2] == entries[0][:2] and entry[5] is group for entry in entries)
            assert shape == tuple(rank_0[name].shape) and found is group
            assert DTYPES[dtype] == rank_0[name].dtype
            taken = []
            for _, _, counts, indices, values, _ in entries:
                assert counts.dtype == torch.int64 and counts.tolist() == [values.numel()]
                assert indices.dtype == torch.int32 and indices.numel() == values.numel()
                rank_0[name].view(-1)[indices.long()] = values
                taken += indices.tolist()
            assert len(taken) == len(set(taken))
        assert names == [*rank_0]
        assert_equal_bits(rank_0, run.weights())


def test_verl_updates_refuse_weights_that_receivers_would_not_write(tmp_path):
    run = PublishedRun(0, tmp_path)
    weights = run.weights()
    first, second = run.publish(full=True)
    for name, message in (("embed", "embed has a NaN"), ("scale", "scale has a NaN")):
        with torch.no_grad():
            run.model.get_parameter(name).view(-1)[0] = float("nan")
        parts = run.publish()
        with pytest.raises(ValueError, match=message):
            verl_flushes(parts, device="cpu")
        with pytest.raises(ValueError, match=message):
            [verl_entries(part, run.model, None, "cpu") for part in parts]
        with torch.no_grad():
            run.model.get_parameter(name).view(-1)[0] = 1.0
        run.publish()
    large = first.patches[0]._replace(shape=(1 << 31,))
    with pytest.raises(ValueError, match=r"has 2\*\*31 elements"):
        verl_flushes([replace(first, patches=(large,)), second], device="cpu")
    codes = large._replace(shape=(4,), dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="is in 8 bits"):
        verl_flushes([replace(first, patches=(codes,)), second], device="cpu")
    with pytest.raises(ValueError, match="elements of embed; pass the parts of all ranks"):
        verl_flushes([replace(first, patches=()), second], device="cpu")
    patch = next(patch for patch in first.patches if patch.name == "embed")
    positions = patch.positions().clone()
    positions[0] = positions[1]
    repeated = tuple(
        one._replace(indices=positions) if one is patch else one for one in first.patches
    )
    with pytest.raises(ValueError, match="elements of embed; pass the parts of all ranks"):
        verl_flushes([replace(first, patches=repeated), second], device="cpu")
    for wrong in (weights | {"embed": weights["bias"]}, {"embed": weights["embed"].float()}):
        with pytest.raises(ValueError, match=r"no weight is (embed|dense) with"):
            verl_entries(first, wrong, None, "cpu")


def test_verl_flushes_refuse_a_torch_without_hash_tensor(monkeypatch):
    monkeypatch.delattr(torch, "hash_tensor")
    with pytest.raises(RuntimeError, match=r"has no hash_tensor.*install the torch version"):
        verl_flushes([])
