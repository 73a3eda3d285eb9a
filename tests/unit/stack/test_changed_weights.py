"""Deltas of changed weights: order, refusals and the file format."""

import pytest
import torch

import mp_optim
from mp_optim import WeightDelta, apply_delta
from support.models import build, train


def named(model):
    return dict(model.named_parameters())


def test_changed_weights_is_refused_unless_changes_are_tracked():
    model, optimizer = build("bf16")
    with pytest.raises(RuntimeError, match="call track_changes"):
        optimizer.changed_weights()
    optimizer.track_changes()
    optimizer.track_changes(False)
    with pytest.raises(RuntimeError, match="call track_changes"):
        optimizer.changed_weights()
    unnamed = mp_optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"model\.named_parameters\(\)"):
        unnamed.track_changes()


def test_apply_delta_refuses_publications_out_of_order():
    model, optimizer = build("bf16")
    optimizer.track_changes()
    start = {name: p.detach().clone() for name, p in named(model).items()}
    deltas = []
    for step in range(4):
        train(model, optimizer, 1, start=step)
        deltas.append(optimizer.changed_weights())
    copy = {name: value.clone() for name, value in start.items()}
    with pytest.raises(ValueError, match=r"\(after=None\).*changed_weights\(full=True\)"):
        apply_delta(copy, deltas[1])
    after = apply_delta(copy, deltas[0])
    with pytest.raises(ValueError, match="publication 1 was applied already"):
        apply_delta(copy, deltas[0], after)
    with pytest.raises(ValueError, match="publication 2 was not applied before publication 3"):
        apply_delta(copy, deltas[2], after)
    with pytest.raises(
        ValueError, match="publications 2 to 3 were not applied before publication 4"
    ):
        apply_delta(copy, deltas[3], after)
    assert apply_delta(copy, deltas[1], after) != after
    optimizer.track_changes()
    with pytest.raises(ValueError, match=r"to run .*track_changes\(\)"):
        apply_delta(copy, optimizer.changed_weights(), after)
    full = optimizer.changed_weights(full=True)
    after = apply_delta(copy, full, after)
    assert all(torch.equal(copy[name], p) for name, p in named(model).items())
    train(model, optimizer, 1)
    apply_delta(copy, optimizer.changed_weights(), after)
    assert all(torch.equal(copy[name], p) for name, p in named(model).items())


def test_apply_delta_writes_nothing_when_a_tensor_does_not_match():
    model, optimizer = build("bf16")
    optimizer.track_changes()
    train(model, optimizer, 1)
    delta = optimizer.changed_weights()
    copy = {name: p.detach().clone() for name, p in named(model).items()}
    for wrong, message in (
        ({"bias": copy["bias"].float()}, "bias is .* torch.float32 in the model"),
        ({"bias": torch.zeros(9).bfloat16()}, r"bias is \(9,\)"),
    ):
        before = {name: torch.zeros_like(value) for name, value in copy.items()} | wrong
        with pytest.raises(ValueError, match=message):
            apply_delta(before, delta)
        assert not any(bool(v.any()) for name, v in before.items() if name != "bias")
    without = {name: value for name, value in copy.items() if name != "dense"}
    with pytest.raises(ValueError, match="the model has no 'dense'"):
        apply_delta(without, delta)


def test_delta_file_is_readable_in_the_format_of_trl(tmp_path):
    """huggingface/trl#5937 reads names from keys ending in .val, and gaps of indices from .idx."""
    from safetensors import safe_open

    model, optimizer = build("bf16")
    receiver = {name: p.detach().clone() for name, p in named(model).items()}
    optimizer.track_changes()
    train(model, optimizer, 1)
    optimizer.changed_weights().save(tmp_path / "delta.safetensors", bitmaps=False)
    with safe_open(tmp_path / "delta.safetensors", framework="pt", device="cpu") as file:
        metadata = file.metadata()
        assert metadata["format"] == "sparse_weight_patch"
        assert metadata["encoding"] == "gap_delta"
        assert (metadata["sparse"], metadata["model_version"], metadata["version"]) == (
            "True",
            "1",
            "1",
        )
        values = [key.removesuffix(".val") for key in file.keys() if key.endswith(".val")]  # noqa: SIM118
        assert len(values) * 2 == len(list(file.keys()))
        for name in values:
            gaps = file.get_tensor(f"{name}.idx")
            assert gaps.dtype in (torch.uint16, torch.uint32)
            indices = torch.cumsum(gaps.to(torch.int64) + 1, 0) - 1
            receiver[name].view(-1)[indices] = file.get_tensor(f"{name}.val")
    assert all(torch.equal(receiver[name], p) for name, p in named(model).items())
    optimizer.changed_weights(full=True).save(tmp_path / "full.safetensors", bitmaps=False)
    with safe_open(tmp_path / "full.safetensors", framework="pt", device="cpu") as file:
        assert file.metadata()["sparse"] == "False"
        assert {*file.keys()} == {*named(model)}
        assert all(torch.equal(file.get_tensor(name), p) for name, p in named(model).items())


def test_delta_load_refuses_a_truncated_or_changed_file(tmp_path):
    model, optimizer = build("bf16")
    optimizer.track_changes()
    train(model, optimizer, 1)
    content = optimizer.changed_weights().to_bytes()
    for cut in (0, 4, 40, len(content) // 2, len(content) - 1):
        with pytest.raises(ValueError, match="the file is not a delta"):
            WeightDelta.from_bytes(content[:cut])
    with pytest.raises(ValueError, match="the file is not a delta"):
        WeightDelta.from_bytes(content.replace(b"sparse_weight_patch", b"sparse_weight_bread"))
