"""State in a file: the bits of every other place, in a few windows of host memory."""

import copy
import ctypes
import errno
import math
import mmap
import os
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mp_optim import (
    AdamW,
    FusedAdam,
    HybridDeviceOptimizer,
    OptimizerConfig,
    checkpoint,
    get_megatron_optimizer,
)
from mp_optim.apps.fit.model_plan import plan
from mp_optim.core.interrupted_step import BrokenOffError
from mp_optim.host.host_memory import page_locked_bytes
from mp_optim.offload.state_storage import FileSource
from mp_optim.offload.worker import WorkerError
from support.launch import environment, run_forked_program
from support.models import AdversarialTransfer
from support.offload import differing, hybrids, snapshot
from support.slow_disk import slow_disk
from support.streamed import (
    FORMS,
    HALVES,
    WHOLE,
    Model,
    give_gradients,
    go_backward,
    stepped,
    train,
)

SHAPES = {"big": (3, 2801), "left": (40, 20), "bias": (7,), "one": (1,), "right": (2300,)}
LARGEST = 200_000
"""Bytes that the largest parameter takes in a window, at most."""


def build(
    folder=None,
    dtype=torch.bfloat16,
    fraction=1.0,
    place="host",
    window=65_536,
    shapes=None,
    transfer=AdversarialTransfer,
    **fields,
):
    """On the device without a folder; else with its state in a file there."""
    model = Model(dtype, shapes or SHAPES)
    offload = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "offload_place": place,
        "optimizer_state_path": folder,
        "stream_window_bytes": window,
    }
    fields.setdefault("weight_decay", 0.1)
    config = OptimizerConfig(
        **{"lr": 1e-2, **HALVES.get(dtype, {}), **fields}, **(offload if folder else {})
    )
    optimizer = get_megatron_optimizer(config, model)
    if transfer is not None:
        for hybrid in hybrids(optimizer):
            hybrid.stepper.use_transfer(transfer())
    return model, optimizer


@st.composite
def programs(draw):
    fields = draw(stepped())
    has_scales = fields.get("exp_avg_dtype") in ("float16", "uint8", "uint4")
    whole = fields["optimizer"] in WHOLE or has_scales
    windows = [LARGEST, 1 << 20] if whole else [65_536, 70_000, LARGEST, 1 << 20]
    return {
        "fraction": draw(st.sampled_from([0.2, 0.7, 1.0])),
        "window": draw(st.sampled_from(windows)),
        "place": draw(st.sampled_from(["host", "streamed"])),
        "transfer": draw(st.sampled_from([AdversarialTransfer, None])),
        **fields,
    }


@settings(max_examples=30, deadline=None, derandomize=True)
@given(program=programs(), is_slow=st.booleans())
def test_the_bits_of_the_device(tmp_path_factory, program, is_slow):
    on_device = {key: program[key] for key in program.keys() - {"place", "transfer"}}
    expected = train(*build(**on_device), 3)
    folder = tmp_path_factory.mktemp("state")
    with slow_disk() if is_slow else nullcontext():
        found = train(*build(folder, **program), 3)
    assert differing(found, expected) == []
    assert list(folder.iterdir()) == []  # it has no name


WIDE = {"wide": (300_000,), "bias": (9,)}


@pytest.mark.parametrize("place", ["host", "streamed"])
def test_state_in_blocks_of_256_is_cut_at_blocks_of_the_disk(tmp_path, place):
    """4096 bytes of scales are those of 262,144 elements."""
    form = {"use_precision_aware_optimizer": True, **FORMS["8-bit"], "shapes": WIDE}
    expected = train(*build(**form), 2)
    with slow_disk():
        model, optimizer = build(tmp_path, place=place, window=4 << 20, **form)
        assert differing(train(model, optimizer, 2), expected) == []
    with pytest.raises(ValueError, match=r"smallest part of wide takes \d+ bytes; set"):
        build(tmp_path, place=place, window=1 << 20, **form)


def test_many_windows_go_through_few(tmp_path):
    """Eight of them and more, in five pieces of memory."""
    shapes = {f"p{n}": (1024 * n + 3,) for n in range(1, 9)}
    expected = train(*build(shapes=shapes), 3)
    for place in ("host", "streamed"):
        with slow_disk():
            how = {"place": place, "shapes": shapes, "window": 32_768}
            model, optimizer = build(tmp_path, **how)
            assert differing(train(model, optimizer, 3), expected) == []


def test_a_file_system_without_direct_access_is_said_so(tmp_path, monkeypatch):
    system_open = os.open

    def opened(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return system_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", opened)
    model, optimizer = build(tmp_path)
    assert differing(train(model, optimizer, 3), train(*build(), 3)) == []
    said = f"the file system of {tmp_path} refuses O_DIRECT; state goes through the"
    assert said in str(optimizer.describe())


# -- between steps it is state as any other -------------------------------------------------------


@pytest.mark.parametrize("place", ["host", "streamed"])
def test_state_that_is_written_between_steps_is_stepped_from(tmp_path, place):
    found = {}
    for folder in (None, tmp_path):
        model, optimizer = build(folder, place=place, fraction=0.7)
        for step in range(4):
            train(model, optimizer, 1, step)
            for index, state in enumerate(optimizer.state_dict()["state"].values()):
                if index != step:  # one is not touched
                    state["exp_avg"].view(-1)[-1] += 0.5
            for _, main in optimizer.named_main_params():
                main.view(-1)[0] *= 0.5
        with torch.no_grad():
            model.right.mul_(0.5)  # its main param follows
        found[folder] = train(model, optimizer, 2, 4)
    assert differing(found[None], found[tmp_path]) == []


def test_a_tensor_that_was_kept_from_an_earlier_look_is_current(tmp_path):
    """And what is written there later counts."""
    found = []
    for folder in (None, tmp_path):
        model, optimizer = build(folder)
        train(model, optimizer, 1)
        kept = optimizer.state_dict()["state"][0]["exp_avg"]
        train(model, optimizer, 2, 1)
        seen = kept.clone()
        kept.add_(1.0)
        found.append({**train(model, optimizer, 2, 3), "seen": seen})
    assert differing(*found) == []


def test_resumed_in_other_places_and_saved_in_the_background(tmp_path):
    compact = {"use_precision_aware_optimizer": True, **FORMS["8-bit"], "window": 1 << 20}
    expected = train(*build(**compact), 7)
    places = [(None, "device"), (tmp_path / "a", "streamed"), (tmp_path / "b", "host")]
    model, optimizer = build(**compact)
    train(model, optimizer, 1)
    for start, (folder, place) in enumerate([*places[1:], places[0]]):
        saved = tmp_path / f"saved {place}"
        handle = checkpoint.save(saved, model, optimizer, asynchronous=True)
        train(model, optimizer, 1, 1 + 2 * start)  # while it is written
        handle.wait()
        if folder is not None:
            folder.mkdir()
        model, optimizer = build(folder, place=place, **compact)
        checkpoint.load(saved, model, optimizer)
        found = train(model, optimizer, 2, 1 + 2 * start)
    assert differing(found, expected) == []


def test_a_parameter_that_comes_later_lies_there_too(tmp_path):
    found = []
    for folder in (None, tmp_path):
        model, optimizer = build(folder)
        train(model, optimizer, 2)
        model.later = nn.Parameter(torch.linspace(-1, 1, 5000).bfloat16())
        optimizer.add_param_group({"params": [("later", model.later)]})
        found.append(train(model, optimizer, 2, 2))
    assert differing(*found) == []


def test_a_step_that_is_not_finite_changes_nothing(tmp_path):
    model, optimizer = build(tmp_path)
    before = train(model, optimizer, 2)
    give_gradients(model, 2)
    model.left.grad[1, 1] = math.nan
    with pytest.warns(UserWarning, match="a step was skipped"):
        assert not optimizer.step().success
    assert differing(snapshot(model, optimizer), before) == []


# -- memory, and what it says of itself -----------------------------------------------------------


class CountingTransfer(AdversarialTransfer):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def empty_host(self, num_bytes, pin):
        assert pin
        self.sizes.append(num_bytes)
        return super().empty_host(num_bytes, pin)


def cached_bytes(hybrid):
    """Bytes of the file that the system keeps in memory."""
    libc, found = ctypes.CDLL(None, use_errno=True), 0
    for segment in hybrid.stepper.host_part.settings.state_file._segments:
        pages = segment.memory.numel() // mmap.PAGESIZE
        resident = (ctypes.c_ubyte * pages)()
        address = ctypes.c_void_p(segment.memory.data_ptr())
        size = ctypes.c_size_t(segment.memory.numel())
        assert libc.mincore(address, size, resident) == 0
        found += mmap.PAGESIZE * sum(page & 1 for page in resident)
    return found


@pytest.mark.parametrize("window", [65_536, 1 << 20])
@pytest.mark.parametrize("place", ["host", "streamed"])
@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_a_run_holds_the_bytes_that_were_planned(tmp_path, form, place, window):
    compact = {"use_precision_aware_optimizer": True} if form != "fp32" else {}
    how = {"place": place, "window": window, **compact, **FORMS[form]}
    model, optimizer = build(tmp_path, **how)
    (hybrid,) = hybrids(optimizer)
    transfer = CountingTransfer()
    hybrid.stepper.use_transfer(transfer)
    planned = plan(model, optimizer.config)
    train(model, optimizer, 2)
    on_disk = os.fstat(hybrid.stepper.host_part.settings.state_file.file._buffered).st_blocks * 512
    assert planned.disk.total == on_disk == sum(hybrid.stepper.host_part.disk_bytes())
    elements = sum(param.numel() for param in model.parameters())
    least = elements * (12 if form == "fp32" else 8)
    assert least <= planned.disk.total < least + 20 * 4096
    assert planned.pinned_host.total == sum(map(page_locked_bytes, transfer.sizes))
    assert sum(transfer.sizes) <= 6 * window + 4096
    counters = sum(param.numel() > 0 for param in model.parameters()) * 4
    assert planned.pageable_host.total == counters
    assert planned.accelerator.main_params == planned.accelerator.moments == 0


@pytest.mark.parametrize("place", ["host", "streamed"])
def test_a_step_reads_and_writes_past_the_page_cache(tmp_path, place):
    model, optimizer = build(tmp_path, place=place)
    (hybrid,) = hybrids(optimizer)
    if not hybrid.stepper.host_part.settings.state_file.file.direct:
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
    assert (
        moved["bytes_read"] == moved["bytes_written"] == sum(hybrid.stepper.host_part.disk_bytes())
    )
    assert moved["disk_wait_ms"] > 0


def test_what_it_says_of_itself(tmp_path):
    said = {}
    for place in ("host", "streamed"):
        model, optimizer = build(tmp_path, place=place)
        train(model, optimizer, 1)
        said[place] = str(optimizer.describe())
        assert f"a file in {tmp_path}, which has no name and is no checkpoint" in said[place]
    assert re.search(r"on the host in windows of [\d,]+ bytes, 5 at", said["host"])
    assert re.search(r"on the device in windows of [\d,]+ bytes, 6 at", said["streamed"])


def test_memory_and_networks_are_no_local_disk(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    lines = ["1 0 8:1 / / rw - ext4 /dev/vda rw", f"2 1 0:9 / {tmp_path} rw - {{}} x rw"]
    monkeypatch.setattr("mp_optim.host.direct_file._MOUNTS", mounts)
    for kind, said in (("nfs4", "a network's file system"), ("tmpfs", "memory")):
        mounts.write_text("\n".join(lines).format(kind))
        _, optimizer = build(tmp_path)
        assert f"{tmp_path} is {said} ({kind}), no local disk" in str(optimizer.describe())
    mounts.write_text(lines[0])
    assert "no local disk" not in str(build(tmp_path)[1].describe())


# -- what fails -----------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_refused_and_one_that_goes_is_not_missed(tmp_path):
    folder = tmp_path / "state"
    with pytest.raises(FileNotFoundError, match="the folder does not exist; make it"):
        build(folder)
    folder.mkdir()
    model, optimizer = build(folder)
    train(model, optimizer, 1)
    shutil.rmtree(folder)
    expected = train(*build(), 3)
    assert differing(train(model, optimizer, 2, 1), expected) == []


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("posix_fallocate", errno.ENOSPC, "free space there, or choose another folder"),
        ("posix_fallocate", errno.EDQUOT, "your quota there is used up"),
        ("open", errno.EROFS, "the file system is read-only; choose another folder"),
    ],
)
def test_a_disk_that_cannot_take_it_is_refused_before_anything(
    tmp_path, monkeypatch, call, error, said
):
    def refuse(*_, **__):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match=said) as raised:
        build(tmp_path)
    assert str(tmp_path) in str(raised.value)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def failing(move, after, error=errno.EIO):
    """A call of the system that fails after so many."""
    calls = []

    def moved(*args):
        calls.append(args)
        if len(calls) > after:
            raise OSError(error, os.strerror(error))
        return move(*args)

    return moved


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("place", ["host", "streamed"])
def test_a_disk_that_fails_breaks_the_step_off(tmp_path, monkeypatch, place, call):
    model, optimizer = build(tmp_path, place=place)
    train(model, optimizer, 2)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(os, call, failing(getattr(os, call), after=9))
    give_gradients(model, 2)
    with pytest.raises(OSError, match="go on from the last checkpoint") as raised:
        optimizer.step()
    assert str(tmp_path) in str(raised.value)
    monkeypatch.undo()
    with pytest.raises(BrokenOffError, match="Load the last checkpoint"):
        optimizer.step()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    expected = train(*build(), 4)
    assert differing(train(model, optimizer, 2, 2), expected) == []


def test_a_disk_that_fails_before_the_first_window_breaks_nothing(tmp_path, monkeypatch):
    model, optimizer = build(tmp_path, fraction=0.7)
    train(model, optimizer, 2)
    monkeypatch.setattr(os, "preadv", failing(os.preadv, after=0))
    give_gradients(model, 2)
    with pytest.raises(OSError, match="the disk fails"):
        optimizer.step()
    monkeypatch.undo()
    expected = train(*build(fraction=0.7), 4)
    assert differing(train(model, optimizer, 2, 2), expected) == []


def test_a_disk_that_fails_when_backward_begins_is_told_by_the_step(tmp_path, monkeypatch):
    model, optimizer = build(tmp_path, offload_mode="overlap")
    train(model, optimizer, 2)
    optimizer.state_dict()  # who has it may write to it, so it has to be brought to the disk
    monkeypatch.setattr(os, "posix_fadvise", failing(None, after=0), raising=False)
    go_backward(model, 2)
    with pytest.raises(WorkerError, match="work on the disk during backward could not be begun"):
        optimizer.step()
    monkeypatch.undo()
    expected = train(*build(), 4)
    assert differing(train(model, optimizer, 2, 2), expected) == []


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize("place", ["host", "streamed"])
def test_a_rule_may_keep_nothing_of_a_parameter_that_is_stepped_where_it_lies(
    tmp_path, place, releases
):
    fields = {"dtype": torch.float32, "optimizer": "sgd", "sgd_momentum": 0.0}
    early = {"offload_mode": "overlap", "release_gradients": True} if releases else {}
    model, optimizer = build(tmp_path, place=place, **fields, **early)
    found = train(model, optimizer, 3)
    assert differing(found, train(*build(**fields), 3)) == []


def test_a_signal_while_windows_get_their_sizes_leaves_them_to_the_next_step(tmp_path, monkeypatch):
    model, optimizer = build(tmp_path)
    give_gradients(model, 0)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FileSource, "resize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert differing(train(model, optimizer, 2), train(*build(), 2)) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import test_disk
from mp_optim import checkpoint

def train(root, place, is_killed):
    model, optimizer = test_disk.build(root / "state", place=place)
    start = 0 if is_killed else checkpoint.load(root / "saved", model, optimizer)["step"]
    for step in range(start, 30):
        if is_killed and step == 17:
            os.pwritev = killed
        test_disk.train(model, optimizer, 1, step)
        if step % 5 == 4:
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


def test_killed_within_a_step_and_resumed_from_the_last_checkpoint(tmp_path):
    expected = train(*build(), 30)
    (tmp_path / "streamed" / "state").mkdir(parents=True)
    where = os.pathsep.join([environment()["PYTHONPATH"], os.path.dirname(__file__)])
    run_forked_program("-c", KILLED, str(tmp_path), "streamed", PYTHONPATH=where)
    model, optimizer = build()
    checkpoint.load(tmp_path / "streamed" / "end", model, optimizer)
    assert differing(snapshot(model, optimizer), expected) == []


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer": "lamb", "window": 8192}, r"big takes \d+ bytes; set stream_window"),
        ({"optimizer": "muon", "window": 8192}, "muon needs whole parameters, and big"),
        ({"fraction": 0.0}, "optimizer_state_path=.*: has no effect without"),
        ({"window": 4096}, "smallest part of .* takes 18432 bytes; set stream_window"),
    ],
)
def test_what_cannot_lie_on_a_disk_is_refused_by_name(tmp_path, fields, said):
    with pytest.raises(ValueError, match=said):
        build(tmp_path, **fields)
    assert list(tmp_path.iterdir()) == []


def test_a_path_is_text():
    with pytest.raises(ValueError, match="optimizer_state_path=3: must be the path of"):
        OptimizerConfig(optimizer_state_path=3).check()


def test_the_class_below_refuses_it_too(tmp_path):
    with pytest.raises(ValueError, match="AdamW cannot be stepped in windows"):
        HybridDeviceOptimizer(
            Model(torch.float32).parameters(),
            1.0,
            torch.optim.AdamW,
            FusedAdam,
            optimizer_state_path=str(tmp_path),
            weight_decay=0.0,
        )


def test_the_torch_shaped_classes_take_it(tmp_path):
    found = []
    for offload in ({}, {"offload": 1.0, "optimizer_state_path": tmp_path}):
        model = Model(torch.float32)
        optimizer = AdamW(model.parameters(), lr=1e-2, **offload)
        for step in range(3):
            give_gradients(model, step)
            optimizer.step()
        found.append(dict(model.named_parameters()))
    assert differing(*found) == [] and "no checkpoint" in str(optimizer.describe())
