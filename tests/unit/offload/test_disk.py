"""Optimizer state in a file: equal bits, failing disks and refused settings."""

import copy
import ctypes
import errno
import mmap
import os
import shutil

import pytest

from mp_optim import checkpoint
from mp_optim.core.interrupted_step import BrokenOffError
from support import streamed
from support.launch import environment, run_forked_program
from support.offload import differing, hybrids, snapshot
from support.streamed import give_gradients, train

SHAPES = {"big": (3, 2801), "left": (40, 20), "bias": (7,), "one": (1,), "right": (2300,)}


def build(folder=None, place="host", window=65_536, **fields):
    place = place if folder else "device"
    return streamed.build(folder, place=place, window=window, shapes=SHAPES, **fields)


def cached_bytes(hybrid):
    libc, found = ctypes.CDLL(None, use_errno=True), 0
    for segment in hybrid.stepper.settings.state_file._segments:
        pages = segment.memory.numel() // mmap.PAGESIZE
        resident = (ctypes.c_ubyte * pages)()
        address = ctypes.c_void_p(segment.memory.data_ptr())
        size = ctypes.c_size_t(segment.memory.numel())
        assert libc.mincore(address, size, resident) == 0
        found += mmap.PAGESIZE * sum(page & 1 for page in resident)
    return found


@pytest.mark.parametrize("place", ["host", "streamed"])
def test_disk_step_leaves_no_page_cached_when_direct_io_is_available(tmp_path, place):
    model, optimizer = build(tmp_path, place=place)
    (hybrid,) = hybrids(optimizer)
    if not hybrid.stepper.settings.state_file.file.direct:
        pytest.fail(f"{tmp_path} does not take O_DIRECT; set TMPDIR to a disk")
    give_gradients(model, 0)
    optimizer.step()
    assert cached_bytes(hybrid) == 0
    snapshot(model, optimizer)
    assert cached_bytes(hybrid) > 0
    give_gradients(model, 1)
    optimizer.step()
    assert cached_bytes(hybrid) == 0
    moved = optimizer.metrics()
    assert moved["bytes_read"] == moved["bytes_written"] == sum(hybrid.stepper.disk_bytes())
    assert moved["disk_wait_ms"] > 0


def test_disk_offload_needs_the_state_folder_only_at_construction(tmp_path):
    folder = tmp_path / "state"
    with pytest.raises(FileNotFoundError, match="the folder does not exist; create it"):
        build(folder)
    folder.mkdir()
    model, optimizer = build(folder)
    train(model, optimizer, 1)
    shutil.rmtree(folder)
    expected = train(*build(), 3)
    assert differing(train(model, optimizer, 2, 1), expected) == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("posix_fallocate", errno.ENOSPC, "free disk space, or choose another folder"),
        ("posix_fallocate", errno.EDQUOT, "your disk quota is used up"),
        ("open", errno.EROFS, "the file system is read-only; choose another folder"),
    ],
)
def test_disk_offload_refuses_a_full_or_read_only_disk_and_leaves_no_file(
    tmp_path, monkeypatch, call, error, message
):
    def refuse(*_, **__):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match=message) as raised:
        build(tmp_path)
    assert str(tmp_path) in str(raised.value)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def failing(move, after, error=errno.EIO):
    calls = []

    def moved(*args):
        calls.append(args)
        if len(calls) > after:
            raise OSError(error, os.strerror(error))
        return move(*args)

    return moved


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("place", ["host", "streamed"])
def test_step_refuses_after_a_disk_error_in_a_step_until_a_load(tmp_path, monkeypatch, place, call):
    model, optimizer = build(tmp_path, place=place)
    train(model, optimizer, 2)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(os, call, failing(getattr(os, call), after=9))
    give_gradients(model, 2)
    with pytest.raises(OSError, match="load the last checkpoint") as raised:
        optimizer.step()
    assert str(tmp_path) in str(raised.value)
    monkeypatch.undo()
    with pytest.raises(BrokenOffError, match="Load the last checkpoint"):
        optimizer.step()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    expected = train(*build(), 4)
    assert differing(train(model, optimizer, 2, 2), expected) == []


def test_disk_error_before_the_first_read_window_leaves_training_unchanged(tmp_path, monkeypatch):
    model, optimizer = build(tmp_path, fraction=0.7)
    train(model, optimizer, 2)
    monkeypatch.setattr(os, "preadv", failing(os.preadv, after=0))
    give_gradients(model, 2)
    with pytest.raises(OSError, match="the disk fails"):
        optimizer.step()
    monkeypatch.undo()
    expected = train(*build(fraction=0.7), 4)
    assert differing(train(model, optimizer, 2, 2), expected) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import test_disk
from mp_optim import checkpoint

def train(root, place, is_killed):
    model, optimizer = test_disk.build(root / "state", place=place)
    start = 0 if is_killed else checkpoint.load(root / "saved", model, optimizer)["step"]
    for step in range(start, 12):
        if is_killed and step == 7:
            os.pwritev = killed
        test_disk.train(model, optimizer, 1, step)
        if step % 3 == 2:
            checkpoint.save(root / "saved", model, optimizer, extra={"step": step + 1})
    checkpoint.save(root / "end", model, optimizer)

def killed(*args, calls=[], write=os.pwritev):
    calls.append(args)
    if len(calls) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*args)

test_disk.build()  # what torch imports late is imported once
root, place = Path(sys.argv[1]) / sys.argv[2], sys.argv[2]
for is_killed in (True, False):
    if not (child := os.fork()):
        train(root, place, is_killed)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (-signal.SIGKILL if is_killed else 0), code
    assert not list((root / "state").iterdir())
"""


def test_resume_gives_equal_bits_when_the_process_is_killed_in_a_disk_write(tmp_path):
    expected = train(*build(), 12)
    (tmp_path / "streamed" / "state").mkdir(parents=True)
    where = os.pathsep.join([environment()["PYTHONPATH"], os.path.dirname(__file__)])
    run_forked_program("-c", KILLED, str(tmp_path), "streamed", PYTHONPATH=where)
    model, optimizer = build()
    checkpoint.load(tmp_path / "streamed" / "end", model, optimizer)
    assert differing(snapshot(model, optimizer), expected) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "lamb", "window": 8192}, r"big needs \d+ bytes; set stream_window"),
        ({"optimizer": "muon", "window": 8192}, "muon needs whole parameters, and big"),
        ({"fraction": 0.0}, "optimizer_state_path=.*: has no effect without"),
        ({"window": 4096}, "smallest part of .* needs 18432 bytes; set stream_window"),
    ],
)
def test_disk_offload_refuses_windows_too_small_and_settings_without_effect(
    tmp_path, fields, message
):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **fields)
    assert list(tmp_path.iterdir()) == []
