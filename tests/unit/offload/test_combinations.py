"""Every combination of gradient source, offload place, mode and fraction gives the bits of the
device."""

import errno
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mp_optim.host.direct_file import DirectFile
from support import streamed
from support.models import AdversarialTransfer
from support.offload import delays, differing, finish_backward_work, snapshot
from support.slow_disk import slow_disk
from support.streamed import WHOLE, Model, give_gradients, stepped

SHAPES = {"big": (3, 2801), "left": (40, 20), "bias": (7,), "one": (1,), "right": (2300,)}
WINDOW = 200_000
"""Window size in bytes. The largest parameter fits in any state form, with its gradient."""
WRITES = ("write grads", "touch grads", "write grads untraced")
EVENTS = ("", "", "read", "write state", "keep", *WRITES, "write param", "bad")


def build(folder: Path | None = None, offloads: bool = True, **fields: Any) -> tuple[Model, Any]:
    how = {"transfer": None, "window": None, "shapes": SHAPES, "bucket_bytes": 8192}
    return streamed.build(folder, place="host" if offloads else "device", **{**how, **fields})


@st.composite
def places(draw: st.DrawFn) -> dict[str, Any]:
    place = draw(st.sampled_from(["host", "streamed"]))
    mode = draw(st.sampled_from(["sync", "overlap", "speculative"]))
    releases = mode != "sync" and draw(st.booleans())
    found: dict[str, Any] = {
        "offload_place": place,
        "offload_mode": mode,
        "release_gradients": releases,
        "fraction": draw(st.sampled_from([0.3, 0.7, 1.0])),
        "transfer": draw(st.sampled_from([AdversarialTransfer, None])),
        "on_disk": draw(st.booleans()) or (place == "streamed" and mode != "sync" and not releases),
    }
    if place != "host" or found["on_disk"]:
        found["stream_window_bytes"] = draw(st.sampled_from([65_536, WINDOW, 1 << 20]))
    return found


def apply_event(
    event: str, model: Model, optimizer: Any, kept: list[Tensor], releases: bool
) -> None:
    states = optimizer.state_dict()["state"] if event in ("read", "write state") else {}
    if event == "write state":
        for state in states.values():
            for key in state.keys() & {"exp_avg", "momentum_buffer"}:
                if state[key].is_floating_point():
                    state[key].view(-1)[-1:] *= 0.5
    for tensor in kept if event == "keep" else ():
        tensor.view(-1)[:1] *= 0.5
    with torch.no_grad():
        if event == "write param":
            model.right.mul_(0.5)
        if event in WRITES and not releases:
            for param in model.parameters():
                grad = param.grad.data if event == "write grads untraced" else param.grad
                grad.mul_(1.0 if event == "touch grads" else 0.5)


def trained(
    model: Model, optimizer: Any, events: list[str], micro: int, releases: bool
) -> tuple[dict[str, Tensor], list[object]]:
    results: list[object] = []
    kept: list[Tensor] = []
    for step, event in enumerate(events):
        optimizer.zero_grad()
        if event == "bad" and not releases:
            give_gradients(model, step, bad=True)
        else:
            for part in range(micro):
                accumulate(model, micro * step + part)
        apply_event(event, model, optimizer, kept, releases)
        results.append(tuple(optimizer.step())[:2])
        if step == 1 and "keep" in events:
            states = optimizer.state_dict()["state"].values()
            kept = [s["exp_avg"] for s in states if s.get("exp_avg") is not None]
            kept = [each for each in kept if each.dtype == torch.float32]
    return snapshot(model, optimizer), results


def accumulate(model: Model, step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    losses = []
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        losses.append((param * grad).sum())
    torch.stack([loss.float() for loss in losses]).sum().backward()


def assert_device_bits(folder: Path, program: dict[str, Any]) -> None:
    program = dict(program)
    place = program.pop("place")
    how = {key: program.pop(key) for key in ("events", "micro")}
    waits, is_slow = program.pop("waits"), program.pop("is_slow")
    is_on_disk = place.pop("on_disk")
    releases = place["release_gradients"]
    on_device = {key: value for key, value in program.items() if key != "transfer"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(*build(offloads=False, **on_device), releases=releases, **how)
        disk = slow_disk() if is_slow and is_on_disk else nullcontext()
        with disk, delays(waits):
            model, optimizer = build(folder if is_on_disk else None, **place, **program)
            found = trained(model, optimizer, releases=releases, **how)
    assert found[1] == expected[1]
    assert differing(found[0], expected[0]) == []


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    fields = draw(stepped())
    place = draw(places())
    has_scales = fields.get("exp_avg_dtype") in ("float16", "uint8", "uint4")
    if "stream_window_bytes" in place and (fields["optimizer"] in WHOLE or has_scales):
        place["stream_window_bytes"] = 1 << 20
    return {
        "place": place,
        "clip_grad": draw(st.sampled_from([0.0, 1.0, 1e6])),
        "events": draw(st.lists(st.sampled_from(EVENTS), min_size=4, max_size=7)),
        "micro": draw(st.integers(1, 2)),
        "waits": draw(st.sampled_from([(), (0.002,), (0.0, 0.004)])),
        "is_slow": draw(st.booleans()),
        **fields,
    }


@settings(max_examples=45, deadline=None, derandomize=True)
@given(program=programs())
def test_offload_matches_device_bits_in_random_programs(tmp_path_factory, program):
    assert_device_bits(tmp_path_factory.mktemp("state"), program)


PLACES = [("host", "overlap"), ("streamed", "overlap")]
ON_DISK = {"stream_window_bytes": 65_536, "clip_grad": 0.0, "transfer": AdversarialTransfer}


def on_disk(folder: Path, place: str, mode: str, **fields: Any) -> tuple[Model, Any]:
    how = {"offload_place": place, "offload_mode": mode}
    return build(folder, **how, **{**ON_DISK, **fields})


def train(model: Model, optimizer: Any, steps: int, start: int = 0) -> dict[str, Tensor]:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        accumulate(model, step)
        assert optimizer.step().success
    return snapshot(model, optimizer)


def on_device(steps: int, **fields: Any) -> dict[str, Tensor]:
    return train(*build(offloads=False, clip_grad=0.0, **fields), steps)


@pytest.mark.parametrize(("place", "mode"), PLACES)
def test_disk_offload_reads_state_once_per_step_and_never_during_backward(
    tmp_path, monkeypatch, place, mode
):
    model, optimizer = on_disk(tmp_path, place, mode)
    read_into, sizes = DirectFile.read_into, list[int]()

    def counted(file: DirectFile, memory: Tensor, offset: int) -> Any:
        sizes.append(memory.numel())
        return read_into(file, memory, offset)

    monkeypatch.setattr(DirectFile, "read_into", counted)
    train(model, optimizer, 1)
    size = sum(sizes)
    for step in range(1, 4):
        sizes.clear()
        accumulate(model, step)
        finish_backward_work(optimizer)
        assert sizes == []  # Windows are read in the step, not during backward.
        optimizer.step()
        assert sum(sizes) == size == optimizer.metrics()["bytes_read"]


@pytest.mark.parametrize("folder", [False, True], ids=["memory", "disk"])
def test_streaming_uploads_a_released_gradient_once_per_step(tmp_path, folder):
    how = {"offload_place": "streamed", "offload_mode": "overlap", "release_gradients": True}
    model, optimizer = build(tmp_path if folder else None, **how, **ON_DISK)
    elements = sum(param.numel() for param in model.parameters())
    for step in range(3):
        for part in range(2):
            accumulate(model, 2 * step + part)
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()
    metrics = optimizer.metrics()
    assert metrics["bytes_up"] == (12 + 2) * elements
    expected = build(offloads=False, clip_grad=0.0)
    for step in range(3):
        expected[1].zero_grad()
        for part in range(2):
            accumulate(expected[0], 2 * step + part)
        expected[1].step()
    assert differing(snapshot(model, optimizer), snapshot(*expected)) == []


def test_streaming_refuses_a_window_too_small_for_a_released_gradient():
    how = {"offload_place": "streamed", "optimizer": "lamb", "stream_window_bytes": 120_000}
    build(**how)
    with pytest.raises(ValueError, match=r"lamb needs whole parameters, and big needs \d+ bytes"):
        build(**how, offload_mode="overlap", release_gradients=True)


def test_step_error_names_a_parameter_that_shrank_after_its_first_backward():
    model, optimizer = build(offload_mode="speculative", clip_grad=0.0)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    torch.autograd.backward(model.big, torch.ones_like(model.big))
    optimizer.zero_grad()
    whole, model.big.data = model.big.data, model.big.data[:1]
    for param in model.parameters():
        torch.autograd.backward(param, torch.ones_like(param))
    with pytest.raises(ValueError, match="big"):
        optimizer.step()
    model.big.grad, model.big.data = None, whole
    assert optimizer.step().success


@pytest.mark.parametrize("mode", ["overlap", "speculative"])
def test_step_raises_the_disk_error_when_a_read_fails_during_backward(tmp_path, monkeypatch, mode):
    model, optimizer = on_disk(tmp_path, "streamed", mode)
    train(model, optimizer, 2)
    optimizer.zero_grad()

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fails)
        accumulate(model, 2)
        with pytest.raises(OSError, match="the disk fails"):
            optimizer.step()
    # The disk failed before the first window, so no parameter was stepped.
    assert optimizer.step().success
    assert differing(train(model, optimizer, 2, 3), on_device(5)) == []
